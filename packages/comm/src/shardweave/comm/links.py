"""Links: what a message costs, inside a node and between nodes.

Two numbers describe a link well enough to choose algorithms by: the latency α that every message pays, and the
bandwidth β that its bytes get. A message of n bytes then takes α + n/β seconds (the model of Hockney 1994). There are
two classes of links, and the bandwidth of each is counted where it becomes scarce::

    node a                           node b            node      inside a node: what one rank gets to a
      rank 0 --- rank 1                rank 4 --- ...            neighbour, each way, while the others talk too
        |          |      network        |             network   between nodes: what the node's whole connection
      rank 2 --- rank 3 =============  rank 5 --- ...            carries, each way; the ranks of the node that
                                                                 use it at the same time share it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ASSUMED", "LINK_CLASSES", "Link", "Links"]

LINK_CLASSES = ("node", "network")
"""Names of the classes of links: inside a node, and between nodes."""


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links."""

    latency: float
    """Seconds from the start of an empty message until it is received: α."""
    bandwidth: float
    """Bytes a second in one direction: β. The other direction has as much at the same time."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"a link's latency of {self.latency} s: it is a number of seconds, zero or more")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"a link's bandwidth of {self.bandwidth} bytes/s: it is a number above zero")

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """How long ``messages`` messages, one after another and of ``nbytes`` together, take."""
        return messages * self.latency + nbytes / self.bandwidth

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Link:
        """The link that takes the given seconds for two messages, each given as (bytes, seconds).

        What is the same in both messages (their start, the bytes that a buffer on the way swallows) is in the
        latency and does not flatter the bandwidth. Measurements so noisy that the large message was no slower
        than the small one say nothing of the latency: it is then 0, and the bandwidth that of the large one.
        """
        (small_bytes, small_seconds), (large_bytes, large_seconds) = small, large
        if not (0 <= small_bytes < large_bytes and small_seconds >= 0 and large_seconds > 0):
            raise ValueError(
                f"{small_bytes} bytes in {small_seconds} s and {large_bytes} bytes in {large_seconds} s: "
                "a link is fitted through a smaller and a larger message, in this order"
            )
        if large_seconds <= small_seconds:
            return cls(0.0, large_bytes / large_seconds)
        bandwidth = (large_bytes - small_bytes) / (large_seconds - small_seconds)
        return cls(max(0.0, small_seconds - small_bytes / bandwidth), bandwidth)


@dataclass(frozen=True, slots=True)
class Links:
    """Both classes of links of a job, and which of them were measured."""

    node: Link
    """Inside a node. Its bandwidth is what one rank gets to a neighbour."""
    network: Link
    """Between nodes. Its bandwidth is that of one node's whole connection."""
    measured: tuple[str, ...] = ()
    """The classes whose numbers were measured, of :data:`LINK_CLASSES`; the others are assumed."""

    def __post_init__(self) -> None:
        if self.measured != tuple(name for name in LINK_CLASSES if name in self.measured):
            raise ValueError(f"measured={self.measured!r}: it holds some of {LINK_CLASSES}, in this order")

    def link(self, name: str) -> Link:
        """The link of a class, by its name."""
        if name not in LINK_CLASSES:
            raise ValueError(f"link class {name!r} does not exist; choose one of {', '.join(LINK_CLASSES)}")
        return self.node if name == "node" else self.network

    def updated(self, measured: Mapping[str, Link]) -> Links:
        """These links with some classes measured anew."""
        names = tuple(name for name in LINK_CLASSES if name in measured or name in self.measured)
        return Links(measured.get("node", self.node), measured.get("network", self.network), names)

    def __str__(self) -> str:
        return "; ".join(
            f"{name} {self.link(name).latency * 1e6:.3g} us, {self.link(name).bandwidth / 1e9:.3g} GB/s "
            f"({'measured' if name in self.measured else 'assumed'})"
            for name in LINK_CLASSES
        )


ASSUMED = Links(node=Link(50e-6, 1e9), network=Link(100e-6, 1.25e9))
"""The links of a job in which nothing was measured.

The assumption: ranks on CPUs that talk through gloo (50 µs and 1 GB/s from process to process over the loopback
device, a round figure for one core's copying), on nodes with one 10 Gbit/s Ethernet connection each. Only
comparisons between algorithms should be made with it; on GPUs, and for seconds that mean something, measure.
"""
