"""Which addresses a process listens on, as Linux tells it: for tests that nothing is open to other machines."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["listeners", "open_to_others"]

_LISTENING = "0A"


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that a process listens on; empty when it has ended."""
    own = set(_socket_inodes(pid))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{table}")):
            _, local, _, state, *rest = line.split()
            if state == _LISTENING and rest[5] in own:
                address, port = local.split(":")
                found.add((_address(address), int(port, 16)))
    return found


def open_to_others(pid: int) -> set[tuple[str, int]]:
    """Those of :func:`listeners` that another machine can reach: all but the loopback addresses."""
    return {
        (address, port) for address, port in listeners(pid) if not ipaddress.ip_address(address).is_loopback
    }


def _socket_inodes(pid: int) -> Iterator[str]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return []


def _address(text: str) -> str:
    """``0100007F`` is 127.0.0.1: words of four bytes, each with the lowest byte first."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    raw = b"".join(struct.pack("<I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
