"""What one optimizer has on this rank: units of parameters, and who reduces, counts and gathers them.

::

    trained parameters  ->  units  ->  Reducer         their gradients, as they become final
                                   ->  NormRanges      what all ranks have to know before any of them updates
                                   ->  GatheredUnits   their parameters, while somebody uses them (stage 3)
    frozen parameters   ->  Unfreezing                 until they are trained, and get units of their own

The optimizer says when, and decides: whether a step is taken, and what gradients are multiplied by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardweave.comm import Pending, Sharding, TensorStatistics, all_reduce, counts_here, sharding_of

from .axes import Axes
from .build import build_units
from .claims import claim, claimed
from .compression import end_step
from .coverage import Coverage
from .equal import persistent_buffers, start_equal
from .groups import Given
from .layout import check_parameters, check_records
from .materialize import Initialize, Materializer
from .module_units import ModuleUnit, UnitChoice, module_limit, module_units, unit_numbers
from .norm import Local, NormRanges, Summary
from .options import Options
from .presence import agree_on_present, num_missing, presence
from .reduce import Reducer
from .shards import Piece, ShardPiece
from .stage3 import GatheredUnits
from .statistics import gradient_statistics
from .trained import TrainedParameters, Unfreezing
from .unit import Unit
from .units import unit_mb

__all__ = ["Holdings"]


class Holdings:
    """The units of one optimizer, built from what it was ``given``; collective over the data and the model axis.

    ``make_optimizer``: torch's optimizer over some pieces. ``states``: ``torch.optim.Optimizer.state``, where each
    parameter's piece shows its own. ``units``, ``initialize``: for stage 3, as the optimizer has them.
    """

    def __init__(
        self,
        given: Given,
        axes: Axes,
        options: Options,
        make_optimizer: Callable[[Sequence[Piece]], Optimizer],
        states: MutableMapping[Tensor, Any],
        *,
        units: UnitChoice | None = None,
        initialize: Initialize | None = None,
    ) -> None:
        self._given, self._axes = given, axes
        far = bool(self._largest(axes.data.link == "network"))  # anywhere: copies of a unit are cut alike
        self._options = options = replace(options, bucket_mb=unit_mb(options.bucket_mb, far=far))
        self._make_optimizer, self._states, self._initialize = make_optimizer, states, initialize
        self.closed = False
        """Whether another optimizer was built over some of the parameters."""
        self._consumed: dict[Unit, set[int]] = {}
        self._reduced = False
        """Whether :meth:`reduce` was called since gradients were last forgotten."""
        self._trained, frozen = self._parted()
        every = [*self._trained, *frozen]
        names = given.names_of(every)
        meta, whole = options.stage == 3, options.ownership == "tensor"
        check_parameters(every, names, axes.data, axes.model, meta=meta, whole=whole)
        self._roster = TrainedParameters(every, names, axes.data, axes.model)
        self._records: list[Sharding] = []
        self._parts = self._split_modules(units)
        self.units = self._units_of(self._trained)
        """In forward order."""
        self._start_equal(frozen)
        self.unfreezing = Unfreezing(
            frozen, options.precision, [p for p in self._trained if not p.requires_grad]
        )
        self.gathered: GatheredUnits | None = None
        """Those that are whole while in use only; None where every rank has all parameters."""
        if self._parts:
            self.gathered = GatheredUnits(
                self.units, given.modules, self._parts, options.gathering, axes.shard
            )
        self.num_groups = self._largest(given.num_groups)
        """Parameter groups, on the rank that has most."""
        self._coverage = Coverage(given.modules, every, claimed)
        if self._parts and (left := self._coverage.left_whole(every)):
            warnings.warn(left, stacklevel=3)
        self._listen()

    # -- between steps ---------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """What arrives inside is not the last of a step."""
        order = self._reducer.order
        order.begin_accumulation()
        completed = False
        try:
            yield
            if self._eager:
                self._leave_to_reducing()
            completed = True
        finally:
            with self._together():
                order.end_accumulation(completed=completed)

    @contextmanager
    def whole(self, module: nn.Module | None) -> Iterator[None]:
        """Inside, every rank has all parameters of ``module``, or all there are; collective."""
        if self.gathered is None:
            yield
            return
        try:
            with self.gathered.whole(module):
                self._hold_launches()
                yield
        finally:
            self._hold_launches()

    @property
    def live_parameters(self) -> int:
        """Elements of parameters that are whole here now, with the units' padding."""
        if self.gathered is not None:
            return self.gathered.residency.live
        return sum(unit.plan.length for unit in self.units)

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients on this rank that no step has used yet."""
        return self._reducer.order.under_way or any(unit.holds_gradients for unit in self.units)

    def pieces(self, scale: float) -> Iterator[ShardPiece]:
        """What this rank keeps and updates, parameter by parameter; gradients are divided by ``scale``."""
        self.take_over_written()
        for unit in self.units:
            gradient = unit.shard.gradient
            for piece in unit.shard.pieces:
                part = None
                if gradient is not None and piece.slot in unit.present:
                    part = gradient[piece.start : piece.stop].view_as(piece.values)
                    part = part if scale == 1.0 else part.to(unit.formats.masters) / scale
                yield ShardPiece(
                    name=unit.names[piece.slot],
                    parameter=piece.parameter,
                    begin=piece.begin,
                    values=piece.values,
                    gradient=part,
                    state=unit.optimizer.state[piece.values],
                    counts=counts_here(piece.parameter, self._axes.model),
                    whole=self._options.ownership == "tensor",
                )

    def gradient_statistics(self, scale: float, stacked: Collection[str]) -> dict[str, TensorStatistics]:
        """Of what was reduced, divided by ``scale``; collective over the data and the model axis."""
        device = self._given.device
        return gradient_statistics(self.units, self._axes, scale=scale, stacked=stacked, device=device)

    def discard(self, *, keep_present: bool) -> None:
        """Forgets all gradients. ``keep_present``: who had one counts as having one of zero in the next step."""
        had = {
            unit: unit.present | unit.local.arrived | self._consumed.get(unit, set()) for unit in self.units
        }
        self._consumed = {}
        with self._together():
            self._reducer.discard()
        for unit, present in had.items():
            unit.present = present if keep_present else set()
        self._let_go()

    @torch.no_grad()
    def take_over_written(self) -> None:
        """What somebody wrote into the module's parameters gets into the values that this rank keeps of them."""
        for unit in self.units:
            if unit.formats.has_masters or self.gathered is not None:
                unit.shard.take_over(unit.flat.written())

    def publish(self) -> None:
        """What somebody wrote into the shards gets into the module's parameters; collective over the data axis."""
        for unit in self.units:
            unit.flat.forget_written()
        self._gather([unit.start_all_gather() for unit in self.units])
        for unit in self.units:
            unit.flat.mark_updated(range(len(unit.parameters)))

    def close(self) -> None:
        """Another optimizer was built over some of the parameters, and gets their gradients from now on."""
        self.closed = True
        self._reducer.order.detach()
        if self.gathered is not None:
            self.gathered.detach()

    # -- the parts of a step ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raises where a step would leave out, or take, what it should not."""
        if self.closed:
            raise ValueError("another ZeroOptimizer was built over these parameters; use that one")
        if self.gathered is not None and self.gathered.residency.contexts:
            raise RuntimeError(
                "step inside full_parameters(): the parameters there would be the old ones; leave it first"
            )
        self._coverage.check()
        check_records(self._trained, self._given.names_of(self._trained), self._records)
        for unit in self.units:
            unit.flat.check_in_place(unit.names)
        self.take_over_written()

    def reduce(self) -> None:
        """Reduces what is left of the gradients, if some rank has any; collective."""
        self._leave_to_reducing()
        with self._together():
            if not self._reduced or self._largest(self._reducer.order.late):
                self._reducer.finish()
        self._reduced = True
        self._hold_launches()

    def summarize(self, *, with_presence: bool) -> Summary:
        """The state that all ranks agree on, after what is late, or trained since, was reduced as well.

        ``with_presence``: a parameter without a gradient is likely.
        """
        with self._together():
            summary = self._summarize(with_presence)
            if summary.changed:
                self._take_in()
            if summary.late:
                self._reducer.finish()
            if summary.changed or summary.late:
                summary = self._summarize(with_presence)
        return summary

    def take_in_unfrozen(self) -> None:
        """Looks, on all ranks, whether something was frozen or unfrozen; collective."""
        if self._largest(self._roster.num_changed):
            self._take_in()

    def agree_on_present(self, summary: Summary) -> None:
        """Whose gradients are missing on some ranks only takes part; collective, if any are missing anywhere."""
        if summary.missing:
            agree_on_present(self.units, self._axes.data, summary.present)

    def update(self, groups: Sequence[Mapping[str, Any]], factor: float) -> None:
        """Takes the step, with the users' ``groups`` as they are now and gradients multiplied by ``factor``.

        Unit by unit, so that a unit's all-gather travels while the next one is updated, and the temporary tensors of
        torch's implementation are as large as one unit's shard. The first unit comes last: units are filled from the
        end, so it is the smallest, and its all-gather has nothing to travel beside.
        """
        if self.gathered is not None:
            self.gathered.residency.forget()  # nobody reads a shard any more that is about to change
        pending = []
        for unit in reversed(self.units):
            unit.step(groups, factor)
            pending.append(unit.start_all_gather())
        self._gather(pending)
        for unit in self.units:
            unit.flat.mark_updated(slot for slot in unit.present if unit.parameters[slot].requires_grad)

    def consume(self, *, skipped: bool, rescaled: float) -> None:
        """Forgets the step's gradients; the cycle is complete, so every rank can do it for itself.

        Leaving that to ``zero_grad`` would add them to the next step's wherever a loop calls the module's, which
        cannot know of reduced gradients. ``rescaled``: the next step's loss scale over this one's.
        """
        end_step(self.units, skipped=skipped, rescaled=rescaled)
        self._consumed = {unit: unit.present for unit in self.units}
        for unit in self.units:
            unit.drop_gradient()
            unit.present = set()
        self._let_go()
        if skipped and self.gathered is not None:
            self.gathered.residency.release_idle()  # also what waits for a backward pass, as after any other step

    def warn_when_kept_whole(self, stacklevel: int) -> None:
        """Somebody asked for shards between micro-batches, and a pipeline held their gradients."""
        if self._reducer.order.held_whole and self._options.shard_between_micro_batches:
            self._reducer.order.held_whole = False
            warnings.warn(
                "shard_between_micro_batches=True has no effect on micro-batches inside a pipeline's step: it holds "
                "their gradients, which stay whole until its last micro-batch; use accumulate() around steps, or "
                "leave the option out",
                stacklevel=stacklevel + 1,
            )

    def _leave_to_reducing(self) -> None:
        if self.gathered is not None:
            self.gathered.reducing()

    def _hold_launches(self) -> None:
        """No reduction is launched that other ranks may not know of: what comes after all was reduced, and inside of a
        context, in which each rank does as it likes."""
        apart = self.gathered is not None and self.gathered.residency.contexts > 0
        self._reducer.order.collecting = self._reduced or apart

    def _together(self) -> AbstractContextManager[None]:
        """Around what all ranks do, so that one of them that does something else is told."""
        return nullcontext() if self.gathered is None else self.gathered.waiting_to_reduce()

    def _summarize(self, with_presence: bool) -> Summary:
        present = presence(self.units, self._given.device) if with_presence else None
        missing = num_missing(self.units)
        return self._norm.summarize(
            Local(self._reducer.order.late, missing, self._roster.num_changed, present)
        )

    def _gather(self, pending: Sequence[Pending[Tensor] | None]) -> None:
        """The module's parameters have their new values afterwards, at stage 3 those that are always whole."""
        for gather in pending:
            if gather is not None:
                gather.wait()
        if self.gathered is not None:
            self.gathered.updated()

    def _let_go(self) -> None:
        """Of what only gradients needed: there are none any more."""
        self._reduced = False
        self._hold_launches()
        self.unfreezing.drop_gradients()
        if self.gathered is not None:
            self.gathered.residency.let_go()

    # -- building --------------------------------------------------------------------------------------

    @property
    def _shards_parameters(self) -> bool:
        """Whether parameters are whole only while in use; frozen ones too, so these have a place from the start."""
        return self._options.stage == 3 and self._axes.shard.size > 1

    def _parted(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that have a place in units from the start, and the others."""
        placed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in self._given.parameters:
            has_place = parameter.requires_grad or (self._shards_parameters and parameter.is_floating_point())
            (placed if has_place else others).append(parameter)
        return placed, others

    def _split_modules(self, choice: UnitChoice | None) -> list[ModuleUnit]:
        """What stage 3 gathers together; nothing where nothing is sharded."""
        if not self._shards_parameters:
            return []
        limit = module_limit(self._options.bucket_mb)
        return module_units(self._given.modules, self._trained, limit=limit, choice=choice)

    def _units_of(self, parameters: Sequence[nn.Parameter]) -> tuple[Unit, ...]:
        """Units of some of the parameters, which belong to this optimizer from now on; collective."""
        claim(parameters, self)
        self._records += [sharding_of(parameter) for parameter in parameters]
        units = build_units(
            parameters,
            self._given.names_of(parameters),
            self._options,
            self._axes,
            self._make_optimizer,
            device=self._given.device,
            groups=unit_numbers(self._parts, parameters) if self._parts else None,
            groups_in_words=self._given.settings,
            materializer=self._materializer(),
        )
        for unit in units:
            for piece in unit.shard.pieces:
                self._states[piece.parameter] = unit.optimizer.state[piece.values]
        return units

    def _materializer(self) -> Materializer | None:
        if self._options.stage < 3 or not any(parameter.is_meta for parameter in self._trained):
            return None
        return Materializer(self._given.modules, self._initialize, self._given.device)

    def _start_equal(self, frozen: Sequence[nn.Parameter]) -> None:
        """What is not trained starts equal as well."""
        still: dict[str, Tensor] = dict(zip(self._given.names_of(frozen), frozen, strict=True))
        for number, module in enumerate(self._given.modules):
            still |= {f"{name} of module {number}": one for name, one in persistent_buffers(module).items()}
        start_equal(
            list(still.values()),
            list(still),
            self._axes.data,
            bucket_mb=self._options.bucket_mb,
            device=self._given.device,
        )

    def _listen(self) -> None:
        """To the gradients of all units, from now on."""
        trained = [unit for unit in self.units if unit.trains]
        whole = sum(unit.plan.length * unit.formats.gradients.itemsize for unit in trained)
        self._eager = self._options.eager(whole)
        self._reducer = self._reduces(trained, eager=self._eager)
        self._hold_launches()
        self._note_frozen()
        self._norm = NormRanges(
            self.units,
            self._axes,
            group_of=self._given.group_of,
            num_groups=self.num_groups,
            device=self._given.device,
            scaled=self._options.loss_scale is not None,
        )

    def _reduces(self, units: Sequence[Unit], *, eager: bool) -> Reducer:
        return Reducer(
            units,
            self._axes.data,
            eager=eager,
            frees=self._options.stage >= 2,
            bucket_mb=self._options.bucket_mb,
        )

    def _note_frozen(self) -> None:
        for unit in self.units:
            unit.frozen = {slot for slot, p in enumerate(unit.parameters) if not p.requires_grad}

    def _take_in(self) -> None:
        """Somebody was frozen or unfrozen somewhere; see [Note: requires_grad may change]. Collective."""
        self._roster.agree()
        new = [p for p in self.unfreezing.parameters if p.requires_grad and not claimed(p)]
        units = tuple(unit for unit in self.units if unit.trains and unit not in self._reducer.units)
        if new:
            self.unfreezing.taken(new)
            units += self._units_of(new)
            self._trained += new
        if units:
            self._add(units)
        self._note_frozen()
        if self.gathered is not None:
            self.gathered.listen()
        self._reducer.order.expect_trained()

    def _add(self, units: Sequence[Unit]) -> None:
        """Gradients of these are reduced from now on, and what has come of them is at once."""
        self.unfreezing.taken([parameter for unit in units for parameter in unit.parameters])
        added = self._reduces(units, eager=False)
        added.finish()
        added.order.detach()
        order = {of_one: number for number, of_one in enumerate(self._given.names)}
        self.units = tuple(
            sorted(
                dict.fromkeys((*self.units, *units)),
                key=lambda unit: min(order[id(p)] for p in unit.parameters),
            )
        )
        self._reducer.order.detach()
        self._listen()

    def _largest(self, number: int) -> int:
        """Of all ranks' numbers."""
        mine = torch.tensor([number], device=self._given.device)
        return int(all_reduce(all_reduce(mine, self._axes.data, "max"), self._axes.model, "max"))
