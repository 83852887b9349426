"""A machine that cannot reach itself is told in a sentence, not after a minute of attempts."""

from __future__ import annotations

import errno
import socket

import pytest

from shardweave.launcher.rendezvous import LocalRendezvous, LoopbackError


def test_a_loopback_that_is_down_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Down(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Down)
    with pytest.raises(
        LoopbackError, match=r"127\.0\.0\.1, .* \(Network is unreachable\): .* `ip link set lo up`"
    ):
        LocalRendezvous(0, "run")
