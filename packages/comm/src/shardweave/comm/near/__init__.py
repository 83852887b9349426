"""Ranks of one host pass tensors through memory that they share, not through sockets.

A message over the loopback device is copied into the kernel and out of it again, by threads that have to be woken, and
then combined. Here a rank writes what the others need into memory that they can read, and tells them in a few bytes::

    rank 0   [buffer] --copy--> [its region] ---\\  notice: call 7 lies at 8192, yours at 4096 is read
    rank 1   [buffer] <--a op b-- its own ------/

``region``: the memory of a rank, and how others see it. ``meeting``: how ranks find each other. ``neighbours``: the
notices. ``circles`` and ``messages``: rounds of all ranks, and what goes between two. ``collectives``: what is made of
rounds.
"""

from __future__ import annotations

from .circles import Circle
from .messages import Messenger
from .neighbours import Neighbours

__all__ = ["Circle", "Messenger", "Neighbours"]
