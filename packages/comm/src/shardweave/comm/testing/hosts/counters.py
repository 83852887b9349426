"""How many bytes crossed a host's link, as the kernel counted them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["INTERFACE", "LinkBytes", "own_traffic", "read_counters"]

INTERFACE = "weave0"
"""The network interface of every host. Not ``eth0``: what is read below is never the machine's own."""


class LinkBytes(NamedTuple):
    """Bytes on a host's link since the host exists, headers included.

    A packet of up to 64 KiB that the kernel segments late (GSO) counts with one header of 66 bytes. Bytes
    between ranks of one host are not in it: they pass over the host's loopback device.
    """

    received: int
    sent: int


def own_traffic() -> LinkBytes:
    """The counters of the host that this rank runs on; RuntimeError where it runs on none of a bench."""
    found = read_counters(Path("/proc/self/net/dev").read_text())
    if found is None:
        raise RuntimeError(
            f"this process has no interface {INTERFACE}: own_traffic() is for ranks that run on hosts, with "
            "run_ranks(..., hosts=hosts) or @pytest.mark.hosts(n)"
        )
    return found


def read_counters(table: str) -> LinkBytes | None:
    """From the text of ``/proc/PID/net/dev``: a line per interface, 8 received and then 8 sent numbers."""
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return LinkBytes(received=int(fields[0]), sent=int(fields[8]))
    return None
