"""The reduction that a training loop calls: one flat buffer, compressed, with its residuals.

Of a step's buckets each has its own. A step looks like this, also when it is skipped::

    for reduction, buffer in zip(reductions, buffers):
        reduction.reduce(buffer)            # in place: the mean gradient, the same bits on all workers
    if all gradients are finite:
        optimizer.step()
        for reduction in reductions: reduction.step()
    else:
        for reduction in reductions: reduction.undo()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..axis import Axis
from .averaging import Averaging
from .gathering import Gathering
from .kept import Kept
from .lowrank import LowRank
from .options import Blocks, Compression, PowerSGD, TopK
from .residuals import OWNER, WORKER, Residual, outside
from .scheme import Layout, Scheme
from .segments import Segment, check_segments
from .swapping import Swapping
from .velocity import Velocity

__all__ = ["CompressedReduction"]


class CompressedReduction:
    """All-reduces one flat buffer of gradients over an axis, compressed, and keeps what was not sent.

    The buffer may be a part of a larger one: for two levels, reduce-scatter inside the node by the sizes of
    :meth:`Compression.cut`, build this over the axis between nodes with :func:`clip_segments` of the part,
    and all-gather inside the node.

    All ranks of the axis build it with equal arguments and make the same calls in the same order. On an axis of
    one rank it is the identity and keeps nothing (but for momentum, and residuals that were loaded, which the
    next step pays).

    Memory for n elements and W workers, in 4-byte numbers (8-byte ones for float64): n + n / W for bits (n if W is 2),
    n for top-k, n and the thin matrices for PowerSGD; n more with units, which bits have after a warm-up, and n more
    with momentum. The same again with ``undoable``, which without it is needed only while reducing; not for units.
    """

    def __init__(
        self,
        options: Compression,
        axis: Axis,
        segments: Iterable[Segment],
        *,
        length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        undoable: bool = True,
    ) -> None:
        """``segments``: what lies in the buffer; ``length``: its elements (default: up to the last segment's end).

        ``dtype``, ``device``: of the buffers; ``undoable``: whether :meth:`undo` is to work.
        """
        segments = tuple(segments)
        length = max((segment.end for segment in segments), default=0) if length is None else length
        if not dtype.is_floating_point:
            raise ValueError(f"dtype: {dtype} is not of gradients; use a floating-point type")
        self.options = options
        self.axis = axis
        self.steps = 0
        """Steps taken, as told by :meth:`step`: the first ``options.warmup`` are not compressed."""
        wide = torch.promote_types(dtype, torch.float32)
        self._layout = Layout(
            axis, check_segments(segments, length), length, wide, device or torch.device("cpu"), undoable
        )
        self._scheme = _scheme(options, self._layout)
        self._velocity = None if options.momentum is None else Velocity(self._layout, options.momentum)

    def reduce(self, buffer: Tensor, op: str = "mean") -> Tensor:
        """Reduces ``buffer`` over the axis **in place** and returns it; collective.

        ``buffer``: 1-D, of the length told, a floating-point type, not necessarily contiguous. ``op``: ``mean``
        or ``sum``. What was infinite or NaN on any worker makes its block (bits) or the whole buffer
        (top-k, PowerSGD) infinite on all of them, and leaves the residuals there as they were.
        """
        self._check(buffer, op)
        data = buffer.detach()
        velocity = self._velocity
        sent = data if velocity is None else velocity.advance(data)
        if self.compresses:
            factor = self.axis.size if op == "sum" else 1
            self._scheme.reduce(sent, data, step=self.steps - self.options.warmup, factor=factor)
        else:
            self._plain(sent, data, op)
        if velocity is not None:
            velocity.keep(data)
        return buffer

    def _plain(self, sent: Tensor, out: Tensor, op: str) -> None:
        """Reduces ``sent`` without compression into ``out``; a lone worker pays what it owes."""
        if sent is not out:
            out.copy_(sent)
        if self.axis.size == 1:
            self._scheme.pay(out)
        self._scheme.plain(out, op)

    @property
    def _kept(self) -> tuple[Kept, ...]:
        """All that is kept from step to step."""
        return self._scheme.kept if self._velocity is None else (*self._scheme.kept, self._velocity.kept)

    @property
    def compresses(self) -> bool:
        """Whether the warm-up is over."""
        return self.axis.size > 1 and self.steps >= self.options.warmup

    def step(self) -> None:
        """Counts a step: call it once when the step's gradients were applied, on all workers alike."""
        self.steps += 1
        self.settle()

    def settle(self) -> None:
        """What was reduced so far stands: :meth:`undo` does not go behind it, and a new step begins."""
        for kept in self._kept:
            kept.settle()
        if self._velocity is not None:
            self._velocity.begin_step()

    def undo(self) -> None:
        """Takes back what :meth:`reduce` did to residuals, velocities and factors since :meth:`settle`, bit for bit.

        For a step that is skipped, on all workers alike. A second call does nothing.
        """
        if not self._layout.undoable:
            raise RuntimeError(
                "undo of a CompressedReduction with undoable=False, which does not keep the residuals of the step "
                "before; build it with undoable=True (the same memory again), or do not skip steps"
            )
        for kept in self._kept:
            kept.undo()
        if self._velocity is not None:
            self._velocity.begin_step()

    def rescale(self, factor: float) -> None:
        """Multiplies residuals and velocities: by b / a when the loss scale changes from a to b."""
        for kept in self._kept:
            kept.rescale(factor)

    def residuals(self) -> Iterator[Residual]:
        """This rank's pieces of what is kept, as live views, good until the next :meth:`reduce`.

        ``worker`` and ``momentum`` are of this worker, ``owner`` of the elements this rank averages; ``factor`` is
        equal on all workers. [Note: What is owed] in ``residuals.py`` says what they mean together.
        """
        for kept in self._kept:
            yield from kept.pieces()

    def places(self) -> Iterator[tuple[str, str, int, int]]:
        """(kind, name, begin, elements) of all that this rank may come to keep, whether or not there is some yet."""
        for kept in self._kept:
            for segment in kept.segments:
                yield kept.kind, segment.name, segment.begin, segment.size

    def load(self, pieces: Iterable[Residual]) -> None:
        """Takes over what ``pieces`` say, from a checkpoint of any bucket layout; the rest starts at zero.

        ``pieces``: at least all of this worker's (or those of worker ``None``, which are everyone's), and all owners'
        in its ranges; others are passed over, so all of a rank's reductions may be given the same ones. After a
        change of the number of workers: :func:`redistribute_residuals` of all workers' pieces. An owner's residual,
        where this kind of compression has none, becomes part of every worker's.
        """
        self._load(pieces, share=1)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: copies of its pieces and the number of steps. Nothing is communicated."""
        pieces = [(p.kind, p.name, p.begin, p.values.clone()) for p in self.residuals()]
        return {"steps": self.steps, "worker": self.axis.rank, "workers": self.axis.size, "pieces": pieces}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Takes over this rank's own state, of one reduction or of several with other bucket layouts.

        When the layout changed, elements may be averaged by another rank than before. What this rank still owed as
        their owner is then added to its own worker's residual, times the number of workers, so that the mean is owed
        the same; nothing needs to be sent.
        """
        for state in states:
            if (state["worker"], state["workers"]) != (self.axis.rank, self.axis.size):
                raise ValueError(
                    f"state of worker {state['worker']} of {state['workers']} loaded by worker {self.axis.rank} of "
                    f"{self.axis.size}: use load with redistribute_residuals of all workers' pieces"
                )
            self.steps = int(state["steps"])
        own = [
            Residual(kind, None, name, begin, values)
            for state in states
            for kind, name, begin, values in state["pieces"]
        ]
        self._load(own, share=self.axis.size)

    def _load(self, pieces: Iterable[Residual], share: int) -> None:
        """``share``: how much of an owner's residual without an owner here is added to this worker's."""
        pieces = list(pieces)
        kept = {kept.kind: kept for kept in self._kept}
        if WORKER not in kept and any(piece.kind in (WORKER, OWNER) for piece in pieces):
            raise ValueError(
                "there are residuals to load, but error_feedback: false keeps none, and what is owed would be "
                "lost; turn error_feedback on, or leave them out"
            )
        orphans: list[Residual] = []
        for piece in pieces if OWNER not in kept or share > 1 else ():
            if piece.kind == OWNER:
                ranges = kept[OWNER].ranges(piece.name) if OWNER in kept else []
                orphans += (
                    Residual(WORKER, None, part.name, part.begin, part.values * share)
                    for part in outside(piece, ranges)
                )
        for one in kept.values():
            one.load(piece for piece in [*pieces, *orphans] if one.takes(piece))

    def _check(self, buffer: Tensor, op: str) -> None:
        layout = self._layout
        if op not in ("mean", "sum"):
            raise ValueError(f"reduce: operation {op!r} is not mean or sum")
        if buffer.shape != (layout.length,):
            raise ValueError(
                f"reduce: a buffer of shape {tuple(buffer.shape)}; it has to be flat, of the {layout.length} elements "
                "that this reduction was built for"
            )
        if not buffer.is_floating_point() or torch.promote_types(buffer.dtype, torch.float32) != layout.dtype:
            raise ValueError(
                f"reduce: a buffer of {buffer.dtype}, but residuals of {layout.dtype}; build the reduction with "
                f"dtype={buffer.dtype}"
            )


def _scheme(options: Compression, layout: Layout) -> Scheme:
    """How a kind of compression is carried out."""
    match options:
        case Blocks():
            return Swapping(layout, options) if layout.axis.size == 2 else Averaging(layout, options)
        case TopK():
            return Gathering(layout, options)
        case PowerSGD():
            return LowRank(layout, options)
        case _:
            raise ValueError(f"{options!r} is not one of OneBit, TwoBit, EightBit, TopK and PowerSGD")
