"""Data parallelism for a loop of one's own: gradients in flat buckets, reduced while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..axis import Axis
from ..collectives import all_reduce, start_all_reduce
from ..compression import CompressedReduction, Compression, Segment
from ..pending import Pending
from ..sharding import sharding_of
from .layout import FlatLayout, default_bucket_bytes, flat_layout, plan_buckets
from .memory import BucketMemory
from .order import OrderedReduction
from .reduction import BackgroundReduction

__all__ = ["GradientBuckets"]


class GradientBuckets:
    """Averages gradients over an axis, bucket by bucket, as soon as the backward pass has filled one.

    ::

        buckets = GradientBuckets(module.named_parameters(), mesh.data)
        for batch in batches:
            loss(module(batch)).backward()      # buckets start to travel here, the last layers first
            buckets.finish()                    # .grad is the mean over the axis on every rank
            optimizer.step()
            optimizer.zero_grad()

    ``parameters``: of one module, alike and in one order on all ranks of ``axis``, or ``(name, parameter)`` pairs;
    frozen ones are left alone. Their values are not touched: that ranks start equal is the caller's (``broadcast``).
    ``bucket_mb``: MiB of a bucket; ``None``: a sixteenth of the gradients, between 1 and 25. ``op``: ``mean``, as DDP
    has it, or ``sum``. ``compression``: sends the gradients so, between nodes only where the axis spans some; see
    :class:`~shardweave.comm.Compression`. ``overlap=False``: everything travels at the end of the backward pass, to
    compare with.

    A rank whose backward pass reaches none of the parameters does not know that there was one: it launches its
    buckets in :meth:`finish`, and until then may not take part in other collectives of the axis.

    A parameter that got no gradient on any rank has ``.grad is None`` afterwards; if it had one on some, the others
    count as zero. Gradients that arrive after a bucket was launched (a second ``backward`` outside of
    :meth:`accumulate`) are reduced in :meth:`finish`, on top.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        axis: Axis,
        *,
        bucket_mb: float | None = None,
        op: str = "mean",
        compression: Compression | None = None,
        overlap: bool = True,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r}: choose 'mean' or 'sum'")
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb!r}: give a size in MiB above 0")
        named = [(name, p) for name, p in _named(parameters) if p.requires_grad]
        trained = [parameter for _, parameter in named]
        _check_copies(named, axis)
        bucket_bytes = default_bucket_bytes(trained) if bucket_mb is None else max(1, int(bucket_mb * 2**20))
        plans = plan_buckets(trained, bucket_bytes)
        self._axis = axis
        self._buckets = tuple(
            _Bucket([named[number] for number in plan], axis, op, compression) for plan in plans
        )
        self._order = OrderedReduction(self._buckets, alone=axis.size == 1, early=overlap)
        self._device = trained[0].device if trained else torch.device("cpu")
        self._counted = False
        """Whether the last finish was counted as a step, and not undone."""

    @torch.no_grad()
    def finish(self) -> None:
        """Waits until all gradients are reduced and puts them into ``.grad``; collective over the axis."""
        self._order.finish()
        flags = self._agree()
        if bool(flags[-1]):
            self._order.finish()
            flags = self._agree()
        present = iter(flags.tolist())
        for bucket in self._buckets:
            bucket.publish([bool(next(present)) for _ in bucket.local.parameters])
        for reduction in self._compressed:
            reduction.steps += 1  # and not settled yet: this step may still be undone
        self._counted = True

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around every micro-batch but the last: its gradients are added up on this rank, and nothing travels."""
        self._order.begin_accumulation()
        completed = False
        try:
            yield
            completed = True
        finally:
            self._order.end_accumulation(completed=completed)

    def undo(self) -> None:
        """The step is skipped on all ranks: what the last :meth:`finish` did to residuals is taken back."""
        for reduction in self._compressed:
            reduction.undo()
            reduction.steps -= self._counted
        self._counted = False

    def close(self) -> None:
        """Stops listening to the parameters."""
        self._order.detach()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by parameter name and range, and the count of steps; empty without compression.

        For the same ranks, with any bucket size; in two levels, where a rank holds a part of each bucket, with the
        same one.
        """
        states = [reduction.state_dict() for reduction in self._compressed]
        return {"buckets": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a :meth:`state_dict` of this rank.

        ValueError: it has a part only of what this rank is to hold of a parameter; see :meth:`state_dict`.
        """
        for reduction in self._compressed:
            _check_covered(reduction, state)
        for reduction in self._compressed:
            reduction.load_state_dict(*state.get("buckets", ()))

    @property
    def _compressed(self) -> list[CompressedReduction]:
        return [bucket.compressed.part for bucket in self._buckets if bucket.compressed is not None]

    def _agree(self) -> Tensor:
        """For each parameter whether any rank had a gradient; last, whether any has some that are not reduced yet."""
        flags = [float(slot in b.present) for b in self._buckets for slot in range(len(b.local.parameters))]
        agreed = torch.tensor([*flags, float(self._order.late > 0)], device=self._device)
        return all_reduce(agreed, self._axis, "max")


class _Bucket:
    """One bucket: its buffer, how it is reduced, and what came of it."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        axis: Axis,
        op: str,
        compression: Compression | None,
    ) -> None:
        parameters = [parameter for _, parameter in named]
        layout = flat_layout([tuple(parameter.shape) for parameter in parameters])
        first = parameters[0]
        self._axis, self._op = axis, op
        self.local = BucketMemory(parameters, layout, dtype=first.dtype, device=first.device, keep=True)
        self.present: set[int] = set()
        """Slots whose parameter had a gradient on this rank since the last step."""
        self.compressed = None
        if compression is not None and axis.size > 1:
            self.compressed = BackgroundReduction(
                compression,
                axis,
                _segments([name for name, _ in named], layout),
                length=layout.length,
                dtype=first.dtype,
                device=first.device,
            )
        self._reduced: Tensor | None = None
        self._settles = False
        """Whether the next reduction is the first of a step."""

    def start_reduction(self) -> tuple[Tensor, Pending[Tensor]]:
        """As :class:`~.order.Reducible`."""
        if self.compressed is not None and self._settles:
            self.compressed.part.settle()
            self._settles = False
        filled = self.local.filled
        self.present |= filled if self.compressed is None else self.compressed.sends(filled)
        buffer = self.local.take()
        if self._axis.size == 1:
            return buffer, Pending.ready(buffer)
        if self.compressed is not None:
            return buffer, self.compressed.start(buffer, self._op)
        return buffer, start_all_reduce(buffer, self._axis, self._op)

    def accept(self, buffer: Tensor, pending: Pending[Tensor]) -> None:
        """As :class:`~.order.Reducible`."""
        result = pending.wait()
        if self._reduced is None:
            self._reduced = result
        else:
            self._reduced.add_(result)
            self.local.give_back(result)

    def publish(self, present: Sequence[bool]) -> None:
        """Puts the reduced gradients into ``.grad`` of the parameters that had one anywhere."""
        reduced, self._reduced = self._reduced, None
        self._settles = True
        self.present.clear()
        if reduced is not None:
            self.local.publish(reduced, present)


def _check_covered(reduction: CompressedReduction, state: Mapping[str, Any]) -> None:
    pieces = [piece for bucket in state.get("buckets", ()) for piece in bucket["pieces"]]
    for kind, name, begin, size in reduction.places():
        same = [(lo, lo + values.numel()) for of, named, lo, values in pieces if (of, named) == (kind, name)]
        held = sum(max(0, min(hi, begin + size) - max(lo, begin)) for lo, hi in same)
        if kind == "worker" and same and held < size:
            raise ValueError(
                f"this state has {held} of the {size} elements that this rank is to hold of {name}: in two levels it "
                "moves between ranks with the buckets; build them with the bucket_mb of the state"
            )


def _check_copies(named: Sequence[tuple[str, nn.Parameter]], axis: Axis) -> None:
    """Refuses what ranks of the axis hold different parts of: adding their gradients up would mix them."""
    for name, parameter in named:
        for split in sharding_of(parameter).splits:
            if split.axis.overlaps(axis):
                raise ValueError(
                    f"parameter {name or tuple(parameter.shape)} is split over {split.axis!r}, so ranks of {axis!r} "
                    "hold different parts of it (experts, say); give the others to these buckets, and it to buckets "
                    "of its own over mesh.expert_data, or all of them to shardweave.zero"
                )


def _named(
    parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Names by record, as given, or by place."""
    for number, item in enumerate(parameters):
        name, parameter = item if isinstance(item, tuple) else (f"parameter.{number}", item)
        yield sharding_of(parameter).name or name, parameter


def _segments(names: Sequence[str], layout: FlatLayout) -> list[Segment]:
    return [
        Segment(name, start, torch.Size(shape).numel(), shape=shape)
        for name, start, shape in zip(names, layout.starts, layout.shapes, strict=True)
    ]
