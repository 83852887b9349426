"""Activations that are computed again in the backward pass instead of being kept: which, and of which blocks.

================  =============================================  ===============================================
value             kept of a block from forward to backward        computed twice
================  =============================================  ===============================================
none              all that backward reads                        nothing
selective         all but the inside of the attention's core     scores, softmax and weighted values
full              what comes into it                             the block
{every: n}        as full, of every n-th block; else as none     these blocks
{operations: …}   what comes in, and the results of products     all but those of ``linear`` and ``attention`` that
                  and of attention that are not named            are not named
================  =============================================  ===============================================

A block is run through torch's checkpoint without reentry, which stands inside whatever runs the block: a schedule's
stage, ZeRO's gathering of the block's parameters. No generator's state is kept or restored: masks of dropout are a
function of what they mask. In evaluation, and wherever no gradients are computed, nothing of this happens.

Sources: Chen et al., arXiv 1604.06174 (full); Korthikanti et al., arXiv 2205.05198, section 5 (selective).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardweave.tensor_parallel import ATTENTION, LINEAR, Kept

__all__ = ["OPERATIONS", "Recompute", "RecomputeValue"]

OPERATIONS = (ATTENTION, LINEAR, "norm", "activation", "elementwise")
"""What a block is made of. The last three are never kept once operations are named: they cost little to compute."""

_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Recompute:
    """Which blocks compute what again. Made by :meth:`of`."""

    mode: Literal["none", "selective", "full", "operations"] = "none"
    """``full`` is also every n-th block's."""

    every: int = 1
    """With ``full``: of so many blocks the last one, counted over the whole model."""

    operations: frozenset[str] = frozenset()
    """With ``operations``: what is computed again; of :data:`OPERATIONS`."""

    @classmethod
    def of(cls, value: RecomputeValue) -> Recompute:
        """From what a configuration file says: ``none``, ``selective``, ``full``, ``{"every": n}`` or ``{"operations":
        [...]}``, names of :data:`OPERATIONS`.

        Raises:
            ValueError: for anything else.
        """
        if isinstance(value, Recompute):
            return value
        if isinstance(value, str) and value in _MODES:
            return cls(cast(Literal["none", "selective", "full"], value))
        if isinstance(value, Mapping) and set(value) == {"every"}:
            return cls("full", every=_count(value["every"]))
        if isinstance(value, Mapping) and set(value) == {"operations"}:
            return cls("operations", operations=_names(value["operations"]))
        raise ValueError(
            f"recompute: {value!r} is not one of {', '.join(_MODES)}, {{every: N}} or {{operations: [...]}}"
        )

    def covers(self, layer: int) -> bool:
        """Whether anything of the block with this global number is computed again."""
        return self.mode != "none" and (layer + 1) % self.every == 0

    @property
    def again(self) -> frozenset[str]:
        """Of ``linear`` and ``attention``, what a covered block computes again."""
        both = frozenset((LINEAR, ATTENTION))
        named = {"none": frozenset[str](), "selective": frozenset((ATTENTION,)), "full": both}
        return named.get(self.mode, self.operations & both)

    @property
    def core(self) -> bool:
        """Whether it is the attention's core alone that is computed again."""
        return self.mode == "selective"

    @property
    def kept(self) -> frozenset[str]:
        """Of ``linear`` and ``attention``, whose results a block keeps that is otherwise computed again as a whole."""
        return frozenset((LINEAR, ATTENTION)) - self.operations if self.mode == "operations" else frozenset()

    def run(self, block: nn.Module, layer: int, *arguments: Any) -> Tensor:
        """``block(*arguments)``, so that the backward pass runs the block once more if that is what it takes."""
        y: Tensor
        if self.core or not self.covers(layer) or not torch.is_grad_enabled():
            y = block(*arguments)
            return y
        contexts = Kept(self.kept).contexts
        y = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return y

    def __str__(self) -> str:
        if self.mode == "operations":
            return f"operations {', '.join(name for name in OPERATIONS if name in self.operations)}"
        return self.mode if self.every == 1 else f"every {self.every}"


RecomputeValue = Recompute | str | Mapping[str, int | Sequence[str]]
"""What :meth:`Recompute.of` takes."""


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"recompute: every: {value!r} must be a whole number of at least 1")
    return value


def _names(value: object) -> frozenset[str]:
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        what = f"{unknown[0]!r} is no operation of a block" if unknown else "no operation is named"
        raise ValueError(
            f"recompute: operations: {what}; name some of {', '.join(OPERATIONS)}, or use recompute: none"
        )
    return frozenset(cast(Sequence[str], names))
