"""A network with delay and loss, for kernels without ``netem``: a process that carries every packet itself.

The process opens a TUN device in each host's network namespace (what a host sends there can be read here, and
what is written here arrives there) and passes each packet on, ``delay`` seconds later, to the host that it
is addressed to. ::

    host 0  weave0 --read--> [ (due, sink, packet), ... ] --write--> weave0  host 1

This file is also the program of that process: run by its path, it needs neither torch nor this package.
Orders come as lines on stdin (``cut 1``, ``mend 1``), each answered by ``ok``; the end of stdin ends it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from ipaddress import IPv4Address

__all__ = ["program"]

# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02

_VNET_HEADER = 10  # bytes before each packet that say how the kernel is to segment it
_DESTINATION = slice(_VNET_HEADER + 16, _VNET_HEADER + 20)  # in the IPv4 header
_MOST = 1 << 17  # no packet is larger
_TURN = 64  # packets taken from one host before the others have their turn


def program(
    hosts: Sequence[tuple[int, str]], *, interface: str, delay: float, loss: float, seed: int = 0
) -> list[str]:
    """The command line of a relay between ``hosts``, each a process in its namespace and its address.

    ``delay``: seconds, one way. ``loss``: the part of packets that gets lost, drawn with ``seed``.
    """
    ends = [f"{pid}:{address}" for pid, address in hosts]
    return [sys.executable, "-I", "-S", __file__, interface, repr(delay), repr(loss), str(seed), *ends]


def main(interface: str, delay: str, loss: str, seed: str, *ends: str) -> None:
    """Opens the devices, says ``ready``, and relays until the end of stdin."""
    offload = float(loss) == 0.0  # otherwise 64 KiB would get lost at once
    devices, sinks = [], {}
    for end in ends:
        pid, _, address = end.partition(":")
        devices.append(_open_device(f"/proc/{pid}/ns/net", interface, offload=offload))
        sinks[IPv4Address(address).packed] = devices[-1]
    print("ready", flush=True)
    _Relay(devices, sinks, float(delay), float(loss), random.Random(int(seed))).run()


class _Relay:
    def __init__(
        self, devices: list[int], sinks: dict[bytes, int], delay: float, loss: float, chance: random.Random
    ) -> None:
        self.devices = devices
        self.sinks = sinks
        """Address of a host -> its device."""
        self.delay, self.loss, self.chance = delay, loss, chance
        self.cut: set[int] = set()
        """Devices of hosts that nothing reaches and that reach nothing."""
        self.queue: collections.deque[tuple[float, int, bytes]] = collections.deque()
        """(when due, sink, packet), by time: the delay is the same for all."""

    def run(self) -> None:
        while True:
            wait = max(0.0, self.queue[0][0] - time.monotonic()) if self.queue else None
            ready = select.select([0, *self.devices], [], [], wait)[0]
            for device in ready:
                if device != 0:
                    self._take(device)
                elif not self._obey():
                    return
            self._deliver()

    def _take(self, device: int) -> None:
        for _ in range(_TURN):
            try:
                packet = os.read(device, _MOST)
            except BlockingIOError:
                return
            sink = self.sinks.get(packet[_DESTINATION])  # None: a broadcast, which no IPv4 host needs here
            if sink is None or device in self.cut or self.chance.random() < self.loss:
                continue
            self.queue.append((time.monotonic() + self.delay, sink, packet))

    def _deliver(self) -> None:
        while self.queue and self.queue[0][0] <= time.monotonic():
            _, sink, packet = self.queue.popleft()
            if sink not in self.cut:
                with contextlib.suppress(
                    OSError
                ):  # its device is down, or its queue is full: lost, as anywhere
                    os.write(sink, packet)

    def _obey(self) -> bool:
        """One order from stdin; False at its end."""
        words = os.read(0, 1024).decode().split()
        if not words:
            return False
        order, host = words
        {"cut": self.cut.add, "mend": self.cut.discard}[order](self.devices[int(host)])
        print("ok", flush=True)
        return True


def _open_device(namespace: str, interface: str, *, offload: bool) -> int:
    """A TUN device in ``namespace``; it is there as long as this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(namespace, os.O_RDONLY)
    if libc.setns(place, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.close(place)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 if offload else 0)
    return device


if __name__ == "__main__":
    main(*sys.argv[1:])
