"""One unit at run time: the buffers of a :class:`UnitPlan` on this rank.

::

                     stage 0           stage 1            stage 2               (stage 3)
    parameters       whole             whole              whole                 shard; whole while in use
    gradients        whole             whole, kept        whole while arriving  whole while arriving
    reduced          = gradients       part of gradients  shard                 shard
    masters, moments whole             shard              shard                 shard

[Note: Reduced in place]
    A reduction's result is written when everything was sent, and then this rank's part of what it read is of no use any
    more. So where the whole buffer outlives the reduction (stages 0 and 1) the result goes to that part, and a reduced
    gradient needs no memory of its own. It has to make room before the buffer collects gradients again, which happens
    only when more arrive before the step, see [Note: Late gradients] in ``shardweave.comm.buckets.order``.

[Note: Sums of parts]
    16-bit floats are added up in float32, or every hop of an all-reduce would round. Where whole gradients are reduced
    (stage 0), each rank adds up a part of them, rounds it once, and the parts are gathered: the bytes of an all-reduce
    in 16 bits, with each element summed on one rank only. The second half is launched when the first one's result is
    taken.

[Note: Reduced gradients keep their format]
    The update is computed in the masters' format, and torch's optimizers want the gradient in it. A copy of all of them
    would cost as much again as 16-bit gradients save; a step copies one unit's at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardweave.comm import (
    Axis,
    BackgroundReduction,
    BucketMemory,
    Compression,
    Pending,
    Segment,
    split_sizes,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_reduce_to_shard,
    wait_when_dropped,
)

from .flat import FlatParameters
from .gathered import GatheredParameters
from .options import Options
from .precision import Formats
from .shards import Piece, Shard, scale_gradient, settings
from .units import UnitPlan

__all__ = ["Unit"]


class Unit:
    """Parameters, gradients and shard of one unit.

    ``axis``: what gradients are reduced over; ``shard_axis``: it, or the part of it that one replica is sharded over;
    ``share``: how much of the data axis ``axis`` is. ``names``: of the parameters, in slot order. ``make_optimizer``:
    gives torch's optimizer for the shard's pieces.
    """

    def __init__(
        self,
        plan: UnitPlan,
        flat: FlatParameters,
        names: Sequence[str],
        *,
        axis: Axis,
        shard_axis: Axis,
        share: float = 1.0,
        options: Options,
        formats: Formats,
        make_optimizer: Callable[[Sequence[Piece]], Optimizer],
    ) -> None:
        self.plan, self.flat, self.names, self.formats = plan, flat, tuple(names), formats
        self.sharded = options.stage > 0 and shard_axis.size > 1
        if not formats.has_masters:
            flat.settle(formats.parameters)  # the shard is then a part of the converted buffer
        position = shard_axis.rank if self.sharded else None
        self.shard = Shard(flat, position, formats, whole=options.ownership == "tensor")
        flat.settle(formats.parameters)
        self._axis, self._shard_axis, self._op = axis, shard_axis, options.reduction
        self._factor = share if options.reduction == "mean" else 1.0
        """Makes a mean over the axis one over the data axis: experts have seen tokens of all its ranks."""
        self._cuts = split_sizes(plan.length, axis.size)  # for [Note: Sums of parts]
        self._frees = options.stage >= 2
        self.local = BucketMemory(
            flat.parameters,
            plan.layout,
            dtype=formats.gradients,
            device=plan.key.device,
            keep=not self._frees,
            reopened=self._make_room,
        )
        self.optimizer = make_optimizer(self.shard.pieces)
        self.present: set[int] = set()
        """Slots whose parameter has had a gradient since the last step, here or on another rank."""
        self._watches = options.nonfinite == "stop"
        self._extremes: list[Tensor] = []
        self.frozen: set[int] = set()
        """Slots whose parameter is not trained any more, as all ranks agreed; it keeps its place and its state."""
        self.compressed = self._compression(options.compression)
        """How its gradients are sent, where they are compressed."""
        self._incoming: Tensor | None = None
        self._gathering: list[tuple[Tensor, Pending[Tensor]]] = []
        """Buffers whose parts are summed, and on their way to all ranks."""
        wait_when_dropped(self, self._gathering)

    @property
    def sums_parts(self) -> bool:
        """See [Note: Sums of parts]."""
        if self.sharded or self.compressed is not None or self.plan.key.partial or self._axis.size == 1:
            return False
        return self.formats.gradients.itemsize < 4 and self.formats.reduction == self.formats.gradients

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters in slot order."""
        return self.flat.parameters

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is trained now."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def holds_gradients(self) -> bool:
        """Whether there is a gradient here, reduced or not, that no step has used."""
        on_the_way = self._incoming is not None or bool(self._gathering)
        return self.local.waiting or on_the_way or self.shard.gradient is not None

    @property
    def broken_here(self) -> bool:
        """Whether a gradient of this rank's own was not finite in this step; known where such a step is to stop."""
        return not all(bool(torch.isfinite(extremes).all()) for extremes in self._extremes)

    def start_reduction(self) -> tuple[Tensor, Pending[Tensor]]:
        """Takes the local gradients and launches their reduction; returns the buffer that it reads."""
        filled = self.local.filled
        self.present |= filled if self.compressed is None else self.compressed.sends(filled)
        buffer = self.local.take()
        if self._watches and self.plan.numel:
            self._extremes.append(torch.stack(torch.aminmax(buffer[: self.plan.numel])))
        if self._axis.size == 1:
            return buffer, Pending.ready(buffer)
        if self.compressed is not None:
            return buffer, self.compressed.start(buffer[: self.plan.numel], self._op)
        if self.sums_parts:
            out = buffer.split(self._cuts)[self._axis.rank]
            return buffer, start_reduce_scatter(buffer, self._axis, sizes=self._cuts, out=out, op=self._op)
        wire = buffer.to(self.formats.reduction)
        if not self.sharded:
            return buffer, start_all_reduce(wire, self._axis, self._op)
        if self._shard_axis == self._axis:
            out = self._out(buffer)
            return buffer, start_reduce_scatter(wire, self._axis, sizes=self.plan.sizes, out=out, op=self._op)
        return buffer, start_reduce_to_shard(wire, self._axis, out=self._out(buffer), op=self._op)

    def accept(self, buffer: Tensor, pending: Pending[Tensor]) -> None:
        """Waits for a reduction and adds its result to what came before."""
        result = pending.wait()
        if self.sums_parts:
            gather = start_all_gather(self._averaged(result), self._axis, sizes=self._cuts, out=buffer)
            self._gathering.append((buffer, gather))
            return
        if self.compressed is not None:  # reduced everywhere, in place
            part = self._part(buffer)
            result = part.clone() if self.sharded and self._frees else part
        elif not self.sharded and result is not buffer:  # it travelled in another format
            result = buffer.copy_(result)
        if self.sharded:
            self.local.give_back(buffer)
        self._collect(self._averaged(result))

    def start_partial_sum(self, axis: Axis) -> Pending[Tensor] | None:
        """Launches the sum over one more axis of what :meth:`accept` collected."""
        return None if self._incoming is None else start_all_reduce(self._incoming, axis)

    def complete_gradient(self) -> None:
        """What was collected is final: it becomes part of the shard's gradient."""
        self._end_gathering()
        incoming, self._incoming = self._incoming, None
        if self.shard.gradient is None:
            self.shard.gradient = incoming
        elif incoming is not None:
            self.shard.gradient.add_(incoming)
            self._recycle(incoming)

    def drop_gradient(self) -> None:
        """Forgets local and reduced gradients; their memory is kept for the next step below stage 2."""
        self._end_gathering()
        self._extremes.clear()
        self.local.clear()
        for reduced in (self.shard.gradient, self._incoming):
            if reduced is not None:
                self._recycle(reduced)
        self.shard.gradient = self._incoming = None

    def _averaged(self, result: Tensor) -> Tensor:
        return result if self._factor == 1.0 else result.mul_(self._factor)

    def _collect(self, reduced: Tensor) -> None:
        """Adds it to what came before."""
        if self._incoming is None:
            self._incoming = reduced
        else:
            self._incoming.add_(reduced)
            self._recycle(reduced)

    def _end_gathering(self) -> None:
        for buffer, pending in self._gathering:
            pending.wait()
            self._collect(buffer)
        self._gathering.clear()

    def _recycle(self, reduced: Tensor) -> None:
        """A reduced gradient is not needed any more: a whole one is the buffer that collects the next."""
        if not self.sharded:
            self.local.give_back(reduced)

    def step(self, groups: Sequence[Mapping[str, Any]], factor: float = 1.0) -> None:
        """Updates the shard with torch's optimizer, under the present settings of the user's groups.

        ``factor``: what the gradient is multiplied by before, in the masters' format.
        """
        if self.shard.gradient is None or not self.shard.pieces:
            return
        for own, users in zip(self.optimizer.param_groups, groups, strict=True):
            own.update(settings(users))
        # See [Note: Reduced gradients keep their format]
        gradient = self.shard.gradient.to(self.formats.masters)
        scale_gradient(self.optimizer, gradient, factor)
        for piece, part in zip(self.shard.pieces, self.shard.parts(gradient), strict=True):
            if piece.slot in self.present and piece.parameter.requires_grad:
                piece.values.grad = part
        self.optimizer.step()
        for piece in self.shard.pieces:
            piece.values.grad = None

    def start_all_gather(self) -> Pending[Tensor] | None:
        """Puts the updated values into the parameters and, where they are sharded, launches the all-gather."""
        self.shard.publish()
        if not self.sharded or not self.plan.length or isinstance(self.flat, GatheredParameters):
            return None  # at stage 3 whoever uses them gathers them
        mine, sizes = self.shard.published(), self.plan.sizes
        return start_all_gather(mine, self._shard_axis, sizes=sizes, out=self.flat.buffer)

    def _part(self, buffer: Tensor) -> Tensor:
        """This rank's part of a whole buffer."""
        return buffer[self.shard.start : self.shard.stop]

    def _out(self, buffer: Tensor) -> Tensor:
        """Where the shard of a reduction that reads ``buffer`` goes. See [Note: Reduced in place]."""
        part = self._part(buffer)
        return torch.empty_like(part) if self._frees else part

    def _make_room(self, buffer: Tensor) -> None:
        """More gradients come into a buffer of which a part is a reduced one."""
        inside = buffer.untyped_storage().data_ptr()
        if self.shard.gradient is not None and self.shard.gradient.untyped_storage().data_ptr() == inside:
            self.shard.gradient = self.shard.gradient.clone()
        if self._incoming is not None and self._incoming.untyped_storage().data_ptr() == inside:
            self._incoming = self._incoming.clone()

    def _compression(self, options: Compression | None) -> BackgroundReduction | None:
        if options is not None and self.plan.key.reduced is not None:
            raise ValueError(
                f"compression with {self.names[0]}, which is reduced over {self._axis!r} only: residuals of experts "
                "have no place in a checkpoint yet; leave compression out"
            )
        if options is None or self._axis.size == 1 or not self.plan.numel:
            return None
        segments = [
            Segment(name, slot.start, slot.stop - slot.start, shape=slot.shape)
            for name, slot in zip(self.names, self.plan.slots, strict=True)
        ]
        return BackgroundReduction(
            options,
            self._axis,
            segments,
            length=self.plan.numel,
            dtype=self.formats.gradients,
            device=self.plan.key.device,
        )
