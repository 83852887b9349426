"""What a region that is computed again in the backward pass does not compute again: it was kept.

torch's checkpoint runs a region twice, and its selective form keeps the outputs of operations that a policy names.
That is too late for the layers here: what a row-parallel product's operation gives is summed over the ranks and gets
its bias in the same memory, so what was kept would hold both, and the second run would add them again. A layer keeps
its own result instead, behind the sum: the product, and what was sent for it, happen once::

    first run     kept(LINEAR, compute)    compute()     the result is written down
    second run    kept(LINEAR, compute)                  the next one that was written down

The core of attention is torch's own function, whose backward needs what came out of its operation. There torch's
selective form does it, around the core alone.

A region is run by ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=Kept({LINEAR}).contexts)``,
with a new :class:`Kept` for every call. Regions may be inside one another; a result is kept for the innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import create_selective_checkpoint_contexts

__all__ = ["ATTENTION", "LINEAR", "Kept", "core_operations", "kept", "kept_core", "runs_twice"]

LINEAR = "linear"
"""Products with weights: of the parallel layers, and of experts."""

ATTENTION = "attention"
"""Scores, their softmax and the weighted values."""


class Kept:
    """Results of one region, from its first run to its second.

    ``kinds``: of what results are kept, :data:`LINEAR`, :data:`ATTENTION`, both or none.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self.kinds = frozenset(kinds)
        self._again = False
        self._results: list[tuple[tuple[Tensor, int], ...]] = []
        self._next = 0
        self._core: tuple[AbstractContextManager[object], AbstractContextManager[object]] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the first run and around the second, as ``checkpoint`` takes them."""
        return _Run(self, again=False), _Run(self, again=True)

    def begin(self, *, again: bool) -> None:
        """A run begins."""
        self._again, self._next = again, 0

    def result(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``compute`` gives; in the second run what it gave in the first.

        RuntimeError: somebody wrote into it in between.
        """
        if not self._again:
            given = compute()
            self._results.append(tuple((tensor.detach(), tensor._version) for tensor in given))
            return given
        results = self._results[self._next]
        self._next += 1
        if any(tensor._version != version for tensor, version in results):
            raise RuntimeError(
                "the result of a layer was kept for the backward pass and has been written to since; what follows a "
                "layer must not work in place, or its kind has to be computed again"
            )
        return tuple(tensor.detach() for tensor, _ in results)

    def core(self) -> AbstractContextManager[object]:
        """Around torch's operations of an attention core, whose results are kept."""
        if self._core is None:
            self._core = create_selective_checkpoint_contexts(list(core_operations()))
        return self._core[self._again]


class _Run(AbstractContextManager[None]):
    """One of a region's runs; a graph that is kept may ask for the second several times."""

    def __init__(self, region: Kept, *, again: bool) -> None:
        self._region, self._again = region, again
        self._tokens: list[Token[Kept | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_region.set(self._region))
        self._region.begin(again=self._again)

    def __exit__(self, *error: object) -> None:
        _region.reset(self._tokens.pop())


_region: ContextVar[Kept | None] = ContextVar("region that is computed again", default=None)


def runs_twice() -> bool:
    """Whether a region is running whose backward pass computes it again, whatever it keeps."""
    return _region.get() is not None


def kept(kind: str, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``compute()``, or what it gave in the first run of a region that keeps results of this kind.

    For the forward of an autograd function: what it gives has no graph. Every run asks in the same order.
    """
    region = _region.get()
    return compute() if region is None or kind not in region.kinds else region.result(compute)


def kept_core() -> AbstractContextManager[object]:
    """Around torch's operations of an attention core: they are kept where the region keeps attention."""
    if torch.compiler.is_compiling():  # which sees no operations run
        return nullcontext()
    region = _region.get()
    return nullcontext() if region is None or ATTENTION not in region.kinds else region.core()


def core_operations() -> tuple[OpOverload, ...]:
    """torch's fused attention by every name that it has on some device, and the products of one that is written out."""
    names = (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "bmm",
    )  # fmt: skip
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return tuple(packet.default for packet in found if packet is not None)
