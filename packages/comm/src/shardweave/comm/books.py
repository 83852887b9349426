"""Enters a call into the ledger when it was waited for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .axis import Axis
from .ledger import LedgerKey
from .wires import Sent

__all__ = ["recorder"]


def recorder(
    axis: Axis, kind: str, tensor: Tensor, elements: int, sent: Callable[[], Sent]
) -> Callable[[float, float], None]:
    """What a :class:`Pending` calls with its seconds and exposed seconds.

    ``tensor``: of the dtype that travels. ``elements``: of the whole message. ``sent``: asked at the end, when work of
    several rounds knows what it sent.
    """
    ledger, link = axis.ledger, axis.link
    size = elements * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")

    def record(seconds: float, exposed: float) -> None:
        bytes_ = sent()
        far = link == "network"
        here = bytes_.network if far else bytes_.node
        ledger.add(LedgerKey(axis.name, kind, link, dtype), 1, elements, size, here, seconds, exposed)
        if far and bytes_.node:  # see [Note: Two links, one call]
            ledger.add(LedgerKey(axis.name, kind, "node", dtype), 0, 0, 0, bytes_.node, 0.0, 0.0)

    return record
