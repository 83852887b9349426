"""What ``tc tbf``, the kernel's token bucket, is told for a rate; pure functions of numbers."""

from __future__ import annotations

import re

__all__ = ["bits_per_second", "bucket"]

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

_BURST_SECONDS = 1e-3
"""How much may leave at once after a pause. Short, or a small message would cross for free; long enough that
a timer that comes late on a busy machine loses little of the rate (2 % at 200 Mbit/s beside three busy loops
on two cores)."""

_BURST_FRAMES = 2  # at least: the bucket cuts a larger packet into frames, but a frame it cannot hold is lost

_QUEUE_SECONDS = 0.1
_QUEUE_BYTES = 1 << 20
"""At least. TCP keeps about a millisecond of its own data in the queue, and two packets a stream at low
rates: with this much room, nothing is dropped (with 100 kB, four streams at 10 Mbit/s lost half their
packets and a sixth of the rate)."""


def bits_per_second(rate: str | float) -> int:
    """A rate as ``tc`` writes it (``"200mbit"``, ``"1.5gbit"``: decimal) or in bits per second."""
    if isinstance(rate, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?)(bit|kbit|mbit|gbit)", rate)
        if match is None:
            raise ValueError(
                f'rate={rate!r} is not a rate: a number and bit, kbit, mbit or gbit, as in "200mbit"'
            )
        rate = float(match[1]) * _UNITS[match[2]]
    if not 10_000 <= rate <= 100e9:
        raise ValueError(f"rate={rate:g} bit/s: the kernel shapes from 10kbit to 100gbit; None is unshaped")
    return round(rate)


def bucket(rate: int, mtu: int) -> list[str]:
    """The words after ``tc qdisc replace dev X root`` for ``rate`` bit/s and frames of ``mtu`` bytes.

    The kernel counts every frame with its 14 bytes of Ethernet header, also those of a segmented packet
    (GSO), so the payload of TCP arrives at ``(mtu - 52) / (mtu + 14)`` of the rate: 99 % with frames of 9000
    bytes, 95.6 % with 1500.
    """
    burst = max(round(rate / 8 * _BURST_SECONDS), _BURST_FRAMES * (mtu + 14))
    limit = max(round(rate / 8 * _QUEUE_SECONDS), _QUEUE_BYTES)
    return ["tbf", "rate", f"{rate}bit", "burst", str(burst), "limit", str(limit)]
