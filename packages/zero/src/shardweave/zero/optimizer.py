"""The sharded optimizer: ZeRO stages 0 to 3 behind the interface of ``torch.optim.Optimizer``.

A step, in the order things happen::

    backward     gradients arrive in flat buffers; each unit's reduction starts when its last one is final
    step         the rest is reduced; sums over partial axes; norm, and one decision for all ranks;
                 unit by unit: torch's optimizer on this rank's shard, then the unit's all-gather starts;
                 all-gathers end
    stage 3      parameters are gathered unit by unit in the forward and in the backward pass instead

=======  =====================  =================  ==================================================
stage    gradients              masters, moments   elements moved a step, of Psi parameters
=======  =====================  =================  ==================================================
0        whole                  whole              all-reduce Psi (which sends twice its size)
1        whole                  shard              reduce-scatter Psi + all-gather Psi
2        shard, between         shard              the same; with ``shard_between_micro_batches``
         micro-batches too                         Psi more for every further micro-batch
3        the same               shard, and the     2 Psi for the all-gathers of each micro-batch's passes,
                                parameters too     Psi a step where ``keep_gathered`` keeps them all;
                                                   reductions as at stage 2, none after the step
=======  =====================  =================  ==================================================

Psi counts each unit's padding, fewer elements than there are data ranks. The stages and their bytes are those
of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5, 7.
How stage 3 is put together, ``stage3.py`` says.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from shardweave.comm import Axis, Compression, Sharding, all_reduce, counts_here, sharding_of
from shardweave.comm.devices import local_device

from . import state
from .build import build_units
from .compression import (
    UnitResiduals,
    compression_counters,
    end_step,
    load_local_residuals,
    local_residuals,
    unit_residuals,
)
from .coverage import Coverage
from .equal import persistent_buffers, start_equal
from .groups import in_words, listed, parameter_names
from .guard import resident_of
from .layout import check_parameters, check_records
from .loss_scale import LossScale, Scaler
from .materialize import Initialize, Materializer
from .module_units import ModuleUnit, UnitChoice, module_limit, module_units, unit_numbers
from .norm import Local, NormRanges, Summary, clip_coefficient, describe_broken
from .offload import Offload
from .options import Gathering, Options
from .precision import Formats, MixedPrecision
from .presence import agree_on_present, num_missing, presence
from .probe import check_updates
from .prototype import element_states
from .reduce import Reducer
from .replicas import shard_axis
from .shards import ShardPiece, build_optimizer, check_kind, fused_by_default
from .stage3 import GatheredUnits
from .trained import TrainedParameters, Unfreezing
from .unit import Unit
from .units import UnitPlan

__all__ = ["ZeroOptimizer"]

_OWNER = "_shardweave_zero"
_SCALE = "loss_scale/"
"""Before the names of the loss scale's numbers in a local state."""


class ZeroOptimizer(Optimizer):
    """An elementwise ``torch.optim`` class whose state, and gradients, are sharded over the data axis.

    Takes parameters, or parameter groups, as any torch optimizer does, and keeps to the usual loop. Every data
    rank builds it over the same parameters in the same order; rank 0's initial values are broadcast. After
    ``step`` every rank has the whole updated parameters, at stage 3 whenever somebody uses them. Works without any
    process group (``data=Axis.single()``), where it is the plain optimizer with the same arithmetic.

    ``params``: parameters, ``(name, parameter)`` pairs, or groups; they may all be frozen, and on a rank without
    parameters, a stage of a pipeline, ``[{"params": []}]`` stands for none. ``torch_optimizer``: the class, e.g.
    ``torch.optim.AdamW``; its own arguments follow as keywords (the fused implementation of
    Adam, AdamW and Adagrad is chosen where there is one, unless ``fused`` or ``foreach`` is given).
    ``data``: the axis to reduce over and to shard over (``mesh.data``). ``model``: the axis over which the
    model itself is spread (``mesh.model``); needed when parameters carry sharding records.
    ``stage``: 0 to 3, see the module's table. ``clip``: largest global gradient norm, as
    ``torch.nn.utils.clip_grad_norm_`` clips. ``bucket_mb``: size of a unit in MiB of parameters; ``None``: a
    sixteenth of them, between 12 and 25.
    ``shard_between_micro_batches``: from stage 2 on, whether :meth:`accumulate` reduces each micro-batch and keeps
    only the shard (default: yes). ``False`` keeps whole gradients until the last one: as much memory as
    stage 1 while accumulating, and the bytes of one reduction a step. A pipeline that holds gradients over
    its own micro-batches has them kept whole in any case; ``True`` then warns. ``whole_gradients_mb``: left to
    decide, gradients are kept whole if all of them take at most so many MiB on a rank (default 0: never).
    ``nonfinite``: what all ranks do together when any gradient on any rank is infinite or NaN: ``"skip"`` the
    step (nothing changes but :attr:`skipped`), ``"stop"`` with the same ``FloatingPointError`` everywhere, which names
    the step, a parameter and the ranks it came from (each then looks at its gradients once more, before
    they are reduced), or ``"ignore"``. ``reduction``: ``"mean"`` over the data axis, as DDP has it, or ``"sum"`` for
    losses that are already divided by the global count. ``loss_scale``: for float16, see :class:`LossScale`; run
    ``backward`` on :meth:`scale` of the loss (or hand :attr:`loss_scale` to a pipeline's step) and everything else
    stays as it is: ``step`` divides the gradients again, and skips, and halves the scale, where they overflowed on any
    rank.
    ``compression``: how gradients are sent over the data axis, with what is not sent kept for the next step; see
    :class:`~shardweave.comm.Compression`. Updated parameters travel in full at stages 1 and 2. ``ownership``: where
    shards are cut. ``"element"``: anywhere, for optimizers whose arithmetic for an element needs no other.
    ``"tensor"``: between parameters, each of which is one rank's and is updated in its shape; for Muon, Adafactor and
    trust ratios. A class that is not torch's is tried on small tensors, and refused where its parts part from the
    whole. ``shard``: the part of ``data`` that one copy is sharded over (``mesh.shard`` of a mesh with ``replicas``);
    default: all of it. Parameters are then gathered inside a copy, and between copies only sums of shards travel.
    ``module``: what the parameters are in. Its persistent buffers then start equal, too, parameters have its names, and
    ``step`` refuses by name one that was added to it, or unfrozen, and is in no group. Stage 3 needs it: the modules
    tell when parameters are used. All data ranks have to run the same ones in the same order.

    For stage 3. ``units``: the modules whose parameters are gathered together, by class, name or themselves; the rest
    is gathered while the root runs; ``None``: by size, ``bucket_mb`` at most. ``prefetch``: units gathered ahead.
    ``max_live_parameters``: elements gathered at once, at most; what cannot be done within it is an error.
    ``keep_gathered``: elements that may stay gathered from their first use in a step to its end.
    ``persistent_parameters``: units of up to so many elements are gathered once a step. ``initialize``: gives a module
    that was built on the meta device its values, unit by unit (``None``: its ``reset_parameters``); no rank then ever
    holds the whole model. :meth:`full_parameters`: everything whole for a while.

    A parameter that had no gradient on any data rank is left out of the step, as torch does with ``.grad is
    None``; if it had one on some ranks, the others count as zero. ``.grad`` is handed over when it is final and
    reads ``None`` from then on; to look at gradients or edit them, run ``backward`` in :meth:`accumulate`.

    ``step`` consumes the gradients, also when it skips; ``zero_grad`` after it is allowed and does nothing more, and
    ``module.zero_grad()`` is as good. Other than with torch, no gradient is left to be added to the next step's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        torch_optimizer: type[Optimizer],
        *,
        data: Axis,
        model: Axis | None = None,
        stage: int = 1,
        clip: float | None = None,
        precision: MixedPrecision | None = None,
        offload: Offload = Offload.NONE,
        bucket_mb: float | None = None,
        shard_between_micro_batches: bool | None = None,
        nonfinite: str = "skip",
        reduction: str = "mean",
        loss_scale: LossScale | None = None,
        compression: Compression | None = None,
        ownership: str = "element",
        whole_gradients_mb: float = 0,
        shard: Axis | None = None,
        module: nn.Module | Sequence[nn.Module] | None = None,
        units: UnitChoice | None = None,
        prefetch: int = 1,
        max_live_parameters: int | None = None,
        keep_gathered: int = 0,
        persistent_parameters: int = 0,
        initialize: Initialize | None = None,
        **optimizer_arguments: Any,
    ) -> None:
        self._options = Options(
            stage=stage,
            clip=clip,
            precision=precision or MixedPrecision(),
            offload=offload,
            bucket_mb=bucket_mb,
            shard_between_micro_batches=shard_between_micro_batches,
            nonfinite=nonfinite,
            reduction=reduction,
            loss_scale=loss_scale,
            compression=compression,
            ownership=ownership,
            whole_gradients_mb=whole_gradients_mb,
            gathering=Gathering(
                prefetch=prefetch,
                max_live_parameters=max_live_parameters,
                keep_gathered=keep_gathered,
                persistent_parameters=persistent_parameters,
            ),
        )
        self._modules = _listed_modules(module)
        if stage == 3 and not self._modules:
            raise ValueError(
                "stage=3 gathers parameters when their modules run; give the module they are in, module=model"
            )
        self._parts: list[ModuleUnit] = []
        self._unit_choice, self._initialize = units, initialize
        self._gathered: GatheredUnits | None = None
        check_kind(torch_optimizer, whole=self._whole)
        self._kind, self._data, self._model = torch_optimizer, data, model or Axis.single()
        self._shard = shard_axis(data, shard)
        if self._whole and self._shard.size < data.size:
            raise ValueError(
                'ownership="tensor" with shard=: what travels between copies are equal parts of units; leave shard out'
            )
        self._units: tuple[Unit, ...] = ()
        self._consumed: dict[Unit, set[int]] = {}
        self._built = self._closed = False
        self._missed = False  # a parameter in the last step, on any rank
        self._init_groups(params, optimizer_arguments)
        self._build(optimizer_arguments)
        self._built = True
        self._scaler = Scaler(loss_scale)
        self.compressed_steps = 0
        """Steps that compression has counted, of which the first are plain; the same on all ranks."""
        self.num_steps = 0
        """How often :meth:`step` was called, skipped steps included; the same on all ranks."""
        self.skipped = 0
        """Steps that were skipped because a gradient was not finite."""
        self.step_skipped = False
        """Whether the last :meth:`step` was one of them; a learning-rate scheduler should not move then."""
        self.step_backed_off = False
        """Whether the last :meth:`step` was skipped and :attr:`loss_scale` is smaller now: the routine of finding
        the scale, and no sign of trouble as other skipped steps are."""
        self.grad_norm = torch.full((), float("nan"), dtype=torch.float64)
        """The last step's global gradient norm before clipping, without the loss scale: 0-d, float64, the same on
        all ranks."""
        self.group_norms = [self.grad_norm] * self._num_groups
        """The same of each parameter group, in the order of the groups; their squares add up to ``grad_norm``'s. A
        group is what the ranks have under one number, so with pipelines all stages should give the same groups."""

    # -- the loop --------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Reduces what is left, clips and updates; collective: all ranks of data and model axis call it.

        Afterwards every rank's module holds the new parameters. ``closure``: evaluated first, once.
        """
        self._check_usable()
        self.num_steps += 1
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_when_kept_whole()
        if self._gathered is not None:
            self._gathered.reducing()
        self._reducer.finish()
        summary = self._summarize()
        if summary.changed:
            self._take_in()
        if summary.late:
            self._reducer.finish()
        if summary.changed or summary.late:
            summary = self._summarize()
        scale = self.loss_scale
        self._missed = summary.missing
        self.grad_norm = summary.norm / scale
        self.group_norms = [norm / scale for norm in summary.groups]
        applied = False
        try:
            broken = summary.broken or not bool(torch.isfinite(summary.norm))
            self.step_skipped = self._decide(broken)
            if not self.step_skipped:
                if summary.missing:
                    agree_on_present(self._units, self._data, summary.present)
                # One multiplication clips and takes the loss scale out.
                self._update(clip_coefficient(self.grad_norm, self._options.clip) / scale)
                applied = True
            self.step_backed_off = broken and self._scaler.can_back_off
            self._scaler.move(overflow=broken)
        finally:
            end_step(self._units, skipped=not applied, rescaled=self.loss_scale / scale)
            self.compressed_steps += applied
            self._consume()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """What to call ``backward`` on: the loss times :attr:`loss_scale`, or the loss itself where there is none."""
        return self._scaler.apply(loss)

    @property
    def loss_scale(self) -> float:
        """What the loss of this step is multiplied by, the same on all ranks; 1 without ``loss_scale``.

        It changes in :meth:`step` only, so the micro-batches of a step share it.
        """
        return self._scaler.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, also those whose reduction is under way; after :meth:`step` there are none.

        ``set_to_none=False``: parameters that had one, before the last step too, count as having a gradient of
        zero in the next step. Their ``.grad`` reads ``None`` in both cases: zeros need no memory here.
        """
        had = {
            unit: unit.present | unit.local.arrived | self._consumed.get(unit, set()) for unit in self._units
        }
        self._consumed = {}
        self._reducer.discard()
        for unit, present in had.items():
            unit.present = set() if set_to_none else present
        self._unfreezing.drop_gradients()
        if self._gathered is not None:
            self._gathered.residency.let_go()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around every micro-batch but the last: its gradients are added to what follows.

        Works at every stage. At stages 0 and 1, and with ``shard_between_micro_batches=False``, nothing is
        communicated inside and ``.grad`` stays readable. At stage 2 each exit reduces the micro-batch into the
        shard, so all data ranks have to enter equally often.
        """
        order = self._reducer.order
        order.begin_accumulation()
        completed = False
        try:
            yield
            if self._gathered is not None and self._eager:
                self._gathered.reducing()
            completed = True
        finally:
            order.end_accumulation(completed=completed)

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Reduces what is left of the gradients now, as :meth:`step` would do first; collective like it.

        Between this and ``step`` (or inside a hook of ``register_step_pre_hook``) :meth:`pieces` has the gradients that
        the step will use. A second call finds nothing left to do.
        """
        self._check_usable()
        if self._gathered is not None:
            self._gathered.reducing()
        self._reducer.finish()
        self.take_in_unfrozen()

    @torch.no_grad()
    def take_in_unfrozen(self) -> None:
        """Gives parameters that are trained by now, and were frozen when the optimizer was built, a place in it.

        Collective over the data and the model axis. :meth:`step` does it by itself; call this before :meth:`pieces` is
        looked at. A load does it, too. ValueError, on all ranks: a parameter is trained on some and frozen on others.
        """
        if self._largest(self._roster.num_changed):
            self._take_in()

    # -- what is where ---------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """0 to 3."""
        return int(self._options.stage)

    @property
    def model(self) -> Axis:
        """The axis over which the model is spread."""
        return self._model

    @property
    def reduction(self) -> str:
        """``mean`` or ``sum`` over the data axis."""
        return self._options.reduction

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """The flat buffers, in forward order: which parameter lies where, and their padding."""
        return tuple(unit.plan for unit in self._units)

    @property
    def formats(self) -> tuple[Formats, ...]:
        """The number formats in force, one entry for each dtype among the parameters."""
        return tuple(dict.fromkeys(unit.formats for unit in self._units))

    def pieces(self) -> Iterator[ShardPiece]:
        """What this rank keeps and updates, parameter by parameter, in forward order of the units."""
        self._take_over_written()
        scale = self.loss_scale
        for unit in self._units:
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
                    counts=counts_here(piece.parameter, self._model),
                    whole=self._whole,
                )

    def name_of(self, parameter: Parameter) -> str:
        """What the optimizer calls a parameter: its record's canonical name, else the one given with it, else its
        place in the groups (``group0.3``)."""
        return self._names[id(parameter)]

    def element_states(self, parameter: Parameter) -> dict[str, torch.dtype]:
        """The torch optimizer's states that have one element for each of the parameter's (``exp_avg``, ...), and their
        formats."""
        masters = self._options.precision.resolve(parameter.dtype).masters
        shape = tuple(range(2, 2 + parameter.dim())) if self._whole and parameter.dim() else (3,)
        values = torch.ones(shape, dtype=masters, device=self._device)
        return element_states(self._make_optimizer, parameter, values)

    def residuals(self) -> Iterator[UnitResiduals]:
        """What compressed gradients have not sent yet, unit by unit, in forward order; nothing without compression."""
        return unit_residuals(self._units)

    def frozen(self) -> dict[str, Parameter]:
        """The parameters that were frozen since the optimizer was built: it has no shard of them."""
        return {self._names[id(parameter)]: parameter for parameter in self._unfreezing.parameters}

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients on this rank that no :meth:`step` has used yet."""
        return self._reducer.order.under_way or any(unit.holds_gradients for unit in self._units)

    @torch.no_grad()
    def publish(self) -> None:
        """After somebody wrote into the values of :meth:`pieces`: puts them into the module's parameters.

        Collective over the data axis.
        """
        self._publish()

    # -- checkpoints -----------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What is kept besides tensors and settings, the same on all ranks: torch class, skipped steps, loss scale."""
        return {
            "kind": self._kind.__name__,
            "steps": self.num_steps,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale_state(),
            "compression": compression_counters(self._options.compression, self._data, self.compressed_steps),
        }

    def load_counters(self, saved: Mapping[str, Any]) -> None:
        """Goes on from :meth:`counters`, on any layout."""
        self.num_steps = int(saved.get("steps", 0))
        self.skipped = int(saved.get("skipped", 0))
        self.load_loss_scale_state(saved.get("loss_scale", {}))

    def loss_scale_state(self) -> dict[str, float | int]:
        """Where the loss scale stands, as two plain numbers, the same on all ranks; ``{}`` without ``loss_scale``."""
        return self._scaler.plain()

    def load_loss_scale_state(self, saved: Mapping[str, float | int]) -> None:
        """Goes on from a :meth:`loss_scale_state`, on any layout; from the beginning for ``{}``.

        Without ``loss_scale`` there is nothing to go on with, and what was saved is left aside. Gradients that were
        computed under another scale are not converted: load between steps.
        """
        self._scaler.restore(self._scaler.read(saved))

    def local_state(self) -> state.LocalState:
        """This rank's values, optimizer state and settings as a flat dict of tensors and numbers.

        For checkpoints that are loaded on the same layout. The tensors are copies. Frozen parameters and module
        buffers are the module's, not the optimizer's, and are not in it.
        """
        self._take_over_written()
        saved = state.capture(self._units, self.param_groups, self._layout())
        saved["steps"] = self.num_steps
        saved["skipped"] = self.skipped
        saved |= {f"{_SCALE}{key}": value for key, value in self.loss_scale_state().items()}
        saved |= local_residuals(self._units)
        return saved

    def load_local_state(self, saved: state.LocalState) -> None:
        """Restores a :meth:`local_state` of this rank; collective over the data axis.

        The module's parameters are restored too. ``ValueError``, with nothing changed, when it was saved on
        another layout or rank.
        """
        scale = self._scaler.read(
            {key.removeprefix(_SCALE): value for key, value in saved.items() if key.startswith(_SCALE)}
        )
        self.take_in_unfrozen()
        with torch.no_grad():
            state.restore(saved, self._units, self.param_groups, self._layout())
            self._publish()
        self.num_steps = int(saved.get("steps", 0))
        self.skipped = int(saved.get("skipped", 0))
        self._scaler.restore(scale)
        self.compressed_steps = load_local_residuals(self._units, saved)

    def state_dict(self) -> dict[str, Any]:
        """:meth:`local_state` in the shape of ``torch.optim.Optimizer.state_dict``: this rank's pieces."""
        return state.to_torch(self.local_state(), super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a :meth:`state_dict` of this rank; collective over the data axis."""
        self.load_local_state(state.from_torch(state_dict, list(self._names.values())))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is built: the flat buffers are laid out for the parameters it was given."""
        if self._built:
            raise ValueError(
                f"ZeroOptimizer cannot take further parameters ({in_words(param_group, self._modules)}); give all "
                f"groups when building it, or build a new one"
            )
        super().add_param_group(param_group)

    # -- building --------------------------------------------------------------------------------------

    def _init_groups(self, params: Iterable[Any], arguments: dict[str, Any]) -> None:
        super().__init__(listed(params), {})
        parameters = [p for group in self.param_groups for p in group["params"]]
        spoken = arguments.keys() | {key for group in self.param_groups for key in group}
        arguments.update(fused_by_default(self._kind, {p.device for p in parameters}, spoken))
        # Built over nothing, to ask it for its defaults and to have it refuse wrong arguments now.
        self.defaults = self._kind([{"params": []}], **arguments).defaults
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._names = parameter_names(self.param_groups, self._modules)
        # Of frozen ones too: a rank that trains nothing still takes part in what the others decide.
        self._device = parameters[0].device if parameters else torch.device("cpu")
        if self._device.type == "meta":
            self._device = local_device()
        self._trained = [
            p for p in parameters if p.requires_grad or (self._shards_parameters and _can_train(p))
        ]
        placed = {id(parameter) for parameter in self._trained}
        self._frozen = [parameter for parameter in parameters if id(parameter) not in placed]
        self._group_of = {
            id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]
        }

    def _build(self, arguments: dict[str, Any]) -> None:
        every = [*self._trained, *self._frozen]
        names = [self._names[id(parameter)] for parameter in every]
        check_parameters(every, names, self._data, self._model, meta=self.stage == 3, whole=self._whole)
        if every:
            masters = self._options.precision.resolve(every[0].dtype).masters
            groups = [group for group in self.param_groups if group["params"]]
            check_updates(
                self._kind, groups, arguments, whole=self._whole, device=self._device, dtype=masters
            )
        self._roster = TrainedParameters(every, names, self._data, self._model)
        self._make_optimizer = functools.partial(build_optimizer, self._kind, self.param_groups, arguments)
        self._records: list[Sharding] = []
        self._parts = self._split_modules()
        self._units = self._units_of(self._trained)
        self._start_equal()
        if self._parts:
            self._gathered = GatheredUnits(
                self._units, self._modules, self._parts, self._options.gathering, self._shard
            )
        self._num_groups = self._largest(len(self.param_groups))
        self._coverage = Coverage(self._modules, every, lambda parameter: _owner(parameter) is not None)
        self._listen()

    def _units_of(self, parameters: Sequence[Parameter]) -> tuple[Unit, ...]:
        """Units of some of the parameters, which belong to this optimizer from now on; collective."""
        self._take_over(parameters)
        self._records += [sharding_of(parameter) for parameter in parameters]
        units = build_units(
            parameters,
            [self._names[id(parameter)] for parameter in parameters],
            self._options,
            self._data,
            self._shard,
            self._make_optimizer,
            device=self._device,
            groups=unit_numbers(self._parts, parameters) if self._parts else None,
            materializer=self._materializer(),
        )
        for unit in units:
            for piece in unit.shard.pieces:
                self.state[piece.parameter] = unit.optimizer.state[piece.values]
        return units

    def _start_equal(self) -> None:
        """What is not trained starts equal as well, and waits to be."""
        still: dict[str, Tensor] = {self._names[id(parameter)]: parameter for parameter in self._frozen}
        for number, module in enumerate(self._modules):
            still |= {f"{name} of module {number}": one for name, one in persistent_buffers(module).items()}
        start_equal(
            list(still.values()),
            list(still),
            self._data,
            bucket_mb=self._options.bucket_mb,
            device=self._device,
        )
        still_placed = [parameter for parameter in self._trained if not parameter.requires_grad]
        self._unfreezing = Unfreezing(self._frozen, self._options.precision, still_placed)

    def _listen(self) -> None:
        """To the gradients of all units, from now on."""
        trained = [unit for unit in self._units if unit.trains]
        whole = sum(unit.plan.length * unit.formats.gradients.itemsize for unit in trained)
        self._eager = self._options.eager(whole)
        self._reducer = Reducer(trained, self._data, eager=self._eager, frees=self._options.stage >= 2)
        for unit in self._units:
            unit.frozen = {slot for slot, p in enumerate(unit.parameters) if not p.requires_grad}
        self._norm = NormRanges(
            self._units,
            self._data,
            self._shard,
            self._model,
            group_of=self._group_of,
            num_groups=self._num_groups,
            device=self._device,
        )

    def _largest(self, number: int) -> int:
        """Of all ranks' numbers."""
        return int(
            all_reduce(
                all_reduce(torch.tensor([number], device=self._device), self._data, "max"), self._model, "max"
            )
        )

    def _take_in(self) -> None:
        """Somebody was frozen or unfrozen somewhere; see [Note: requires_grad may change]. Collective."""
        self._roster.agree()
        new = [p for p in self._unfreezing.parameters if p.requires_grad and _owner(p) is None]
        units = tuple(unit for unit in self._units if unit.trains and unit not in self._reducer.units)
        if new:
            self._unfreezing.taken(new)
            units += self._units_of(new)
            self._trained += new
        if units:
            self._unfreezing.taken([parameter for unit in units for parameter in unit.parameters])
            added = Reducer(units, self._data, eager=False, frees=self._options.stage >= 2)
            added.finish()  # what came before anybody knew
            added.order.detach()
            order = {of_one: number for number, of_one in enumerate(self._names)}
            self._units = tuple(
                sorted(
                    dict.fromkeys((*self._units, *units)),
                    key=lambda unit: min(order[id(p)] for p in unit.parameters),
                )
            )
            self._reducer.order.detach()
            self._listen()
        for unit in self._units:
            unit.frozen = {slot for slot, p in enumerate(unit.parameters) if not p.requires_grad}
        if self._gathered is not None:
            self._gathered.listen()
        self._reducer.order.expect_trained()

    @property
    def _whole(self) -> bool:
        """Whether each parameter is one rank's."""
        return self._options.ownership == "tensor"

    @property
    def _shards_parameters(self) -> bool:
        """Whether parameters are whole only while in use; frozen ones too, so these have a place from the start."""
        return self.stage == 3 and self._shard.size > 1

    def _split_modules(self) -> list[ModuleUnit]:
        """What stage 3 gathers together; nothing where nothing is sharded."""
        if not self._shards_parameters:
            return []
        limit = module_limit(self._options.bucket_mb)
        return module_units(self._modules, self._trained, limit=limit, choice=self._unit_choice)

    def _materializer(self) -> Materializer | None:
        if self.stage < 3 or not any(parameter.is_meta for parameter in self._trained):
            return None
        return Materializer(self._modules, self._initialize, self._device)

    def _take_over(self, parameters: Sequence[Parameter]) -> None:
        """Of several optimizers built over a parameter, the last one gets its gradients."""
        for parameter in parameters:
            previous = _owner(parameter)
            if previous is not None:
                previous._closed = True
                previous._reducer.order.detach()
                if previous._gathered is not None:
                    previous._gathered.detach()
            former = resident_of(parameter)  # of an optimizer that is gone
            if former is not None:
                former.end()
            setattr(parameter, _OWNER, weakref.ref(self))

    # -- the step's parts ------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ValueError("another ZeroOptimizer was built over these parameters; use that one")
        if self._gathered is not None and self._gathered.residency.contexts:
            raise RuntimeError(
                "step inside full_parameters(): the parameters there would be the old ones; leave it first"
            )
        self._coverage.check()
        check_records(self._trained, [self._names[id(p)] for p in self._trained], self._records)
        for unit in self._units:
            unit.flat.check_in_place(unit.names)
        self._take_over_written()

    @torch.no_grad()
    def _take_over_written(self) -> None:
        """What somebody wrote into the module's parameters gets into the values that this rank keeps of them."""
        for unit in self._units:
            if unit.formats.has_masters or self._gathered is not None:
                unit.shard.take_over(unit.flat.written())

    def _summarize(self) -> Summary:
        present = presence(self._units, self._device) if self._missed else None
        missing = num_missing(self._units)
        local = Local(self._reducer.order.late, missing, self._roster.num_changed, present)
        return self._norm.summarize(local)

    def _warn_when_kept_whole(self) -> None:
        if self._reducer.order.held_whole and self._options.shard_between_micro_batches:
            self._reducer.order.held_whole = False
            warnings.warn(
                "shard_between_micro_batches=True has no effect on micro-batches inside a pipeline's step: it holds "
                "their gradients, which stay whole until its last micro-batch; use accumulate() around steps, or "
                "leave the option out",
                stacklevel=4,
            )

    def _decide(self, broken: bool) -> bool:
        """Whether all ranks skip this step."""
        if not broken or self._options.nonfinite == "ignore":
            return False
        if self._options.nonfinite == "stop" and not self._scaler.can_back_off:
            found = describe_broken(self._units, self._data, self._model)
            at = f" at the smallest loss scale, {self.loss_scale:g}" if self._options.loss_scale else ""
            raise FloatingPointError(f"step {self.num_steps}: {found}{at}; no parameter was changed")
        self.skipped += 1
        return True

    def _update(self, factor: float) -> None:
        """Unit by unit, so that a unit's all-gather travels while the next one is updated, and the temporary
        tensors of torch's implementation are as large as one unit's shard."""
        if self._gathered is not None:
            self._gathered.residency.release_idle()  # nobody reads a shard any more that is about to change
        pending = []
        for unit in self._units:
            unit.step(self.param_groups, factor)
            pending.append(unit.start_all_gather())
        for gather in pending:
            if gather is not None:
                gather.wait()
        if self._gathered is not None:
            self._gathered.updated()
        for unit in self._units:
            unit.flat.mark_updated(slot for slot in unit.present if unit.parameters[slot].requires_grad)

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None) -> Iterator[None]:
        """Every rank has the whole parameters of ``module`` (default: all) inside; collective over the data axis.

        To look at them, to save them, to generate text with as many steps on each rank as it likes, and to edit them:
        what is written, alike on all data ranks, stays. Below stage 3 that is so everywhere. It goes beyond
        ``max_live_parameters``; do not call :meth:`step` inside.
        """
        if self._gathered is None:
            yield
            return
        with self._gathered.whole(module):
            yield

    @property
    def live_parameters(self) -> int:
        """Elements of parameters that this rank holds whole now, with the units' padding; below stage 3 all of them."""
        if self._gathered is not None:
            return self._gathered.residency.live
        return sum(unit.plan.length for unit in self._units)

    def _consume(self) -> None:
        """Forgets the step's gradients; the cycle is complete, so every rank can do it for itself.

        Leaving that to ``zero_grad`` would add them to the next step's wherever a loop calls the module's, which
        cannot know of reduced gradients.
        """
        self._consumed = {unit: unit.present for unit in self._units}
        for unit in self._units:
            unit.drop_gradient()
            unit.present = set()
        self._unfreezing.drop_gradients()
        if self._gathered is not None:
            self._gathered.residency.let_go()

    def _publish(self) -> None:
        for unit in self._units:
            unit.flat.forget_written()
        pending = [unit.start_all_gather() for unit in self._units]
        for gather in pending:
            if gather is not None:
                gather.wait()
        if self._gathered is not None:
            self._gathered.updated()
        for unit in self._units:
            unit.flat.mark_updated(range(len(unit.parameters)))

    def _layout(self) -> dict[str, Any]:
        return {
            "stage_is_sharded": self._options.stage > 0,
            "ownership": self._options.ownership,
            "data_size": self._data.size,
            "data_rank": self._data.rank,
            "model_size": self._model.size,
            "model_rank": self._model.rank,
            "optimizer": self._kind.__name__,
            "shard_size": self._shard.size,
            "workers": compression_counters(self._options.compression, self._data, 0).get("workers", 0),
        }


def _owner(parameter: Parameter) -> ZeroOptimizer | None:
    """The optimizer that the parameter's gradients go to."""
    reference = getattr(parameter, _OWNER, None)
    found = reference() if reference is not None else None
    return found if isinstance(found, ZeroOptimizer) and not found._closed else None


def _listed_modules(module: nn.Module | Sequence[nn.Module] | None) -> tuple[nn.Module, ...]:
    if module is None:
        return ()
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    if not all(isinstance(one, nn.Module) for one in modules):
        raise ValueError(
            f"module={module!r}: give an nn.Module, or a list of those that a pipeline rank runs"
        )
    return modules


def _can_train(parameter: Parameter) -> bool:
    return parameter.is_floating_point()
