"""The sharded optimizer: ZeRO stages 0 to 3 behind the interface of ``torch.optim.Optimizer``.

A step, in the order things happen::

    backward     gradients arrive in flat buffers; each unit's reduction starts when its last one is final
    step         the rest is reduced; sums over partial axes; norm, and one decision for all ranks;
                 unit by unit: torch's optimizer on this rank's shard, then the unit's all-gather starts;
                 all-gathers end
    stage 3      parameters are gathered unit by unit in the forward and in the backward pass instead

=======  =====================  =================  ===========================================================
stage    gradients              masters, moments   elements moved a step, of Psi parameters
=======  =====================  =================  ===========================================================
0        whole                  whole              all-reduce Psi (which sends twice its size)
1        whole                  shard              reduce-scatter Psi + all-gather Psi
2        shard, between         shard              the same; with ``shard_between_micro_batches``
         micro-batches too                         Psi more for every further micro-batch
3        the same               shard, and the     all-gathers for both passes of each micro-batch, 2 Psi less
                                parameters too     what the second begins with; Psi a step where
                                                   ``keep_gathered`` keeps them all;
                                                   reductions as at stage 2, none after the step
=======  =====================  =================  ===========================================================

Psi counts each unit's padding, fewer elements than there are data ranks. The stages and their bytes are those
of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5, 7.
How stage 3 is put together, ``stage3.py`` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from shardweave.comm import Axis, Compression, TensorStatistics

from . import state
from .axes import Axes, check_axes, shard_axis
from .compression import (
    UnitResiduals,
    compression_counters,
    load_local_residuals,
    local_residuals,
    unit_residuals,
)
from .groups import Given, in_words, listed, settings_in_words
from .holdings import Holdings
from .loss_scale import LossScale, Scaler
from .materialize import Initialize
from .module_units import UnitChoice
from .norm import clip_coefficient, describe_broken
from .offload import Offload
from .options import Gathering, Options
from .precision import Formats, MixedPrecision
from .probe import check_updates
from .prototype import element_states
from .shards import ShardPiece, build_optimizer, check_kind, fused_by_default
from .units import UnitPlan

__all__ = ["ZeroOptimizer"]

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
    ``torch.nn.utils.clip_grad_norm_`` clips. ``bucket_mb``: size of a unit in MiB of parameters; ``None``: 25,
    or, where gradients travel between nodes, a sixteenth of them, between 12 and 25.
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
    there ``module.zero_grad()`` is as good. Other than with torch, no gradient is left to be added to the next step's.
    To forget gradients before a step, call :meth:`zero_grad` of the optimizer: the module does not have them any more.
    For the same reason ``torch.nn.utils.clip_grad_norm_`` before a step finds nothing to clip: give ``clip``.
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
        check_axes(data=data, model=model, shard=shard)
        modules = _listed_modules(module)
        if stage == 3 and not modules:
            raise ValueError(
                "stage=3 gathers parameters when their modules run; give the module they are in, module=model"
            )
        check_kind(torch_optimizer, whole=self._whole)
        self._kind = torch_optimizer
        self._axes = Axes(data, shard_axis(data, shard), model or Axis.single())
        if self._whole and self._axes.shard.size < data.size:
            raise ValueError(
                'ownership="tensor" with shard=: what travels between copies are equal parts of units; leave shard out'
            )
        self._built = False
        self._given = self._take(params, modules, optimizer_arguments)
        self._check_updates(optimizer_arguments)
        self._make_optimizer = partial(build_optimizer, self._kind, self.param_groups, optimizer_arguments)
        self._holdings = Holdings(
            self._given,
            self._axes,
            self._options,
            self._make_optimizer,
            self.state,
            units=units,
            initialize=initialize,
        )
        self._built = True
        self._missed = False  # a parameter in the last step, on any rank
        self._scaler = Scaler(loss_scale)
        self.compressed_steps = 0
        """Steps that compression has counted, of which the first are plain; the same on all ranks."""
        self.num_steps = 0
        """How often :meth:`step` was called, skipped steps included; the same on all ranks."""
        self.skipped = 0
        """Steps that were skipped because a gradient was not finite."""
        self.step_skipped = False
        """Whether the last :meth:`step` was one of them; a learning-rate scheduler should not move then."""
        self.nonfinite_gradient = ""
        """After a :meth:`step` that found a gradient that is not finite, and no loss scale to blame: which parameter's
        it is, and from which ranks, the same text on all of them; else empty."""
        self.step_backed_off = False
        """Whether the last :meth:`step` was skipped and :attr:`loss_scale` is smaller now: the routine of finding
        the scale, and no sign of trouble as other skipped steps are."""
        self.grad_norm = torch.full((), float("nan"), dtype=torch.float64)
        """The last step's global gradient norm before clipping, without the loss scale: 0-d, float64, the same on
        all ranks."""
        self.group_norms = [self.grad_norm] * self._holdings.num_groups
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
        self._holdings.check()
        self.num_steps += 1
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._holdings.warn_when_kept_whole(stacklevel=3)
        self._holdings.reduce()
        summary = self._holdings.summarize(with_presence=self._missed)
        scale = self.loss_scale
        self._missed = summary.missing
        self.grad_norm = summary.norm / scale
        self.group_norms = [norm / scale for norm in summary.groups]
        applied = False
        try:
            broken = summary.broken or not bool(torch.isfinite(summary.norm))
            self.step_skipped = self._decide(broken)
            if not self.step_skipped:
                self._holdings.agree_on_present(summary)
                # One multiplication clips and takes the loss scale out.
                factor = clip_coefficient(self.grad_norm, self._options.clip) / scale
                self._holdings.update(self.param_groups, factor)
                applied = True
            self.step_backed_off = broken and self._scaler.can_back_off
            self._scaler.move(overflow=broken)
        finally:
            self._holdings.consume(skipped=not applied, rescaled=self.loss_scale / scale)
            self.compressed_steps += applied
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
        self._holdings.discard(keep_present=not set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around every micro-batch but the last: its gradients are added to what follows.

        Works at every stage. At stages 0 and 1, and with ``shard_between_micro_batches=False``, nothing is
        communicated inside and ``.grad`` stays readable. At stage 2 each exit reduces the micro-batch into the
        shard, so all data ranks have to enter equally often.
        """
        with self._holdings.accumulating():
            yield

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None) -> Iterator[None]:
        """Every rank has the whole parameters of ``module`` (default: all) inside; collective over the data axis.

        To look at them, to save them, to generate text with as many steps on each rank as it likes, and to edit them:
        what is written, alike on all data ranks, stays. Below stage 3 that is so everywhere. It goes beyond
        ``max_live_parameters``; do not call :meth:`step` inside.
        """
        with self._holdings.whole(module):
            yield

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Reduces what is left of the gradients now, as :meth:`step` would do first; collective like it.

        Between this and ``step`` (or inside a hook of ``register_step_pre_hook``) :meth:`pieces` has the gradients that
        the step will use. A second call finds nothing left to do.
        """
        self._holdings.check()
        self._holdings.reduce()
        self._holdings.take_in_unfrozen()

    @torch.no_grad()
    def gradient_statistics(self, *, stacked: Collection[str] = ()) -> dict[str, TensorStatistics]:
        """What each parameter's gradient looks like: root mean square, largest absolute value, fraction of zeros.

        Collective like :meth:`step`, and to be called between ``backward`` and it: of the gradients that it is going to
        use, reduced over all ranks, before clipping and without the loss scale; also of those that it is going to
        skip. By the names of :meth:`name_of`, the same on every rank, each element of the full parameter counted once;
        parameters without a gradient on any rank are left out. Computed in float64. Some small messages for all
        parameters together, and one pass over this rank's shards; nothing in steps that do not call it.

        ``stacked``: names of parameters that are stacks of tensors, such as experts; each of those along the first dim
        is told as well, as ``name[3]``. ValueError, on all ranks: parameters of several ranks have the same name.
        """
        self.finish_reduction()
        return self._holdings.gradient_statistics(self.loss_scale, stacked)

    @torch.no_grad()
    def take_in_unfrozen(self) -> None:
        """Gives parameters that are trained by now, and were frozen when the optimizer was built, a place in it.

        Collective over the data and the model axis. :meth:`step` does it by itself; call this before :meth:`pieces` is
        looked at. A load does it, too. ValueError, on all ranks: a parameter is trained on some and frozen on others.
        """
        self._holdings.take_in_unfrozen()

    # -- what is where ---------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """0 to 3."""
        return int(self._options.stage)

    @property
    def model(self) -> Axis:
        """The axis over which the model is spread."""
        return self._axes.model

    @property
    def reduction(self) -> str:
        """``mean`` or ``sum`` over the data axis."""
        return self._options.reduction

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """The flat buffers, in forward order: which parameter lies where, and their padding."""
        return tuple(unit.plan for unit in self._holdings.units)

    @property
    def formats(self) -> tuple[Formats, ...]:
        """The number formats in force, one entry for each dtype among the parameters."""
        return tuple(dict.fromkeys(unit.formats for unit in self._holdings.units))

    @property
    def live_parameters(self) -> int:
        """Elements of parameters that this rank holds whole now, with the units' padding; below stage 3 all of them."""
        return self._holdings.live_parameters

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients on this rank that no :meth:`step` has used yet."""
        return self._holdings.holds_gradients

    def pieces(self) -> Iterator[ShardPiece]:
        """What this rank keeps and updates, parameter by parameter, in forward order of the units."""
        return self._holdings.pieces(self.loss_scale)

    @torch.no_grad()
    def publish(self) -> None:
        """After somebody wrote into the values of :meth:`pieces`: puts them into the module's parameters.

        Collective over the data axis.
        """
        self._holdings.publish()

    def name_of(self, parameter: Parameter) -> str:
        """What the optimizer calls a parameter: its record's canonical name, else the one given with it, else its
        place in the groups (``group0.3``)."""
        return self._given.names[id(parameter)]

    def element_states(self, parameter: Parameter) -> dict[str, torch.dtype]:
        """The torch optimizer's states that have one element for each of the parameter's (``exp_avg``, ...), and their
        formats."""
        masters = self._options.precision.resolve(parameter.dtype).masters
        shape = tuple(range(2, 2 + parameter.dim())) if self._whole and parameter.dim() else (3,)
        values = torch.ones(shape, dtype=masters, device=self._given.device)
        return element_states(self._make_optimizer, parameter, values)

    def residuals(self) -> Iterator[UnitResiduals]:
        """What compressed gradients have not sent yet, unit by unit, in forward order; nothing without compression."""
        return unit_residuals(self._holdings.units)

    def frozen(self) -> dict[str, Parameter]:
        """The parameters that were frozen since the optimizer was built: it has no shard of them."""
        return {self.name_of(parameter): parameter for parameter in self._holdings.unfreezing.parameters}

    # -- checkpoints -----------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What is kept besides tensors and settings, the same on all ranks: torch class, skipped steps, loss scale."""
        return {
            "kind": self._kind.__name__,
            "steps": self.num_steps,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale_state(),
            "compression": compression_counters(
                self._options.compression, self._axes.data, self.compressed_steps
            ),
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
        self._holdings.take_over_written()
        saved = state.capture(self._holdings.units, self.param_groups, self._layout())
        saved["steps"] = self.num_steps
        saved["skipped"] = self.skipped
        saved |= {f"{_SCALE}{key}": value for key, value in self.loss_scale_state().items()}
        saved |= local_residuals(self._holdings.units)
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
            state.restore(saved, self._holdings.units, self.param_groups, self._layout())
            self._holdings.publish()
        self.num_steps = int(saved.get("steps", 0))
        self.skipped = int(saved.get("skipped", 0))
        self._scaler.restore(scale)
        self.compressed_steps = load_local_residuals(self._holdings.units, saved)

    def state_dict(self) -> dict[str, Any]:
        """:meth:`local_state` in the shape of ``torch.optim.Optimizer.state_dict``: this rank's pieces."""
        return state.to_torch(self.local_state(), super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a :meth:`state_dict` of this rank; collective over the data axis."""
        self.load_local_state(state.from_torch(state_dict, list(self._given.names.values())))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is built: the flat buffers are laid out for the parameters it was given."""
        if self._built:
            which = in_words(param_group, self._given.modules)
            raise ValueError(
                f"ZeroOptimizer cannot take further parameters ({which}); give all groups when building it, or build a "
                f"new one"
            )
        super().add_param_group(param_group)

    # -- how -------------------------------------------------------------------------------------------

    @property
    def _whole(self) -> bool:
        """Whether each parameter is one rank's."""
        return self._options.ownership == "tensor"

    def _take(self, params: Iterable[Any], modules: Sequence[nn.Module], arguments: dict[str, Any]) -> Given:
        """Makes the groups, with torch's defaults in them; ``arguments`` get what is chosen for the user."""
        super().__init__(listed(params), {})
        given = Given.of(self.param_groups, modules)
        spoken = arguments.keys() | {key for group in self.param_groups for key in group}
        arguments.update(fused_by_default(self._kind, {p.device for p in given.parameters}, spoken))
        # Built over nothing, to ask it for its defaults and to have it refuse wrong arguments now.
        try:
            self.defaults = self._kind([{"params": []}], **arguments).defaults
        except TypeError as error:
            error.add_note(
                f"ZeroOptimizer's own arguments are {', '.join(_OWN)}; all others go to {self._kind.__name__}"
            )
            raise
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        return replace(given, settings=settings_in_words(self.param_groups))

    def _check_updates(self, arguments: Mapping[str, Any]) -> None:
        """Raises where torch's optimizer cannot work on what a rank has of a parameter."""
        floats = [p for p in self._given.parameters if p.is_floating_point()]
        if floats:
            first = next((p for p in floats if p.requires_grad), floats[0])
            check_updates(
                self._kind,
                [group for group in self.param_groups if group["params"]],
                arguments,
                whole=self._whole,
                device=self._given.device,
                dtype=self._options.precision.resolve(first.dtype).masters,
            )

    def _decide(self, broken: bool) -> bool:
        """Whether all ranks skip this step."""
        self.nonfinite_gradient = ""
        if not broken or self._options.nonfinite == "ignore":
            return False
        if not self._scaler.can_back_off:
            scaled = self._options.loss_scale is not None
            found = describe_broken(self._holdings.units, self._axes.data, self._axes.model, scaled=scaled)
            at = f" at the smallest loss scale, {self.loss_scale:g}" if scaled else ""
            self.nonfinite_gradient = f"{found}{at}"
            if self._options.nonfinite == "stop":
                raise FloatingPointError(f"step {self.num_steps}: {found}{at}; no parameter was changed")
        self.skipped += 1
        return True

    def _layout(self) -> dict[str, Any]:
        return {
            "stage_is_sharded": self._options.stage > 0,
            "ownership": self._options.ownership,
            "data_size": self._axes.data.size,
            "data_rank": self._axes.data.rank,
            "model_size": self._axes.model.size,
            "model_rank": self._axes.model.rank,
            "optimizer": self._kind.__name__,
            "shard_size": self._axes.shard.size,
            "workers": compression_counters(self._options.compression, self._axes.data, 0).get("workers", 0),
        }


_OWN = tuple(
    name
    for name, parameter in inspect.signature(ZeroOptimizer.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def _listed_modules(module: nn.Module | Sequence[nn.Module] | None) -> tuple[nn.Module, ...]:
    if module is None:
        return ()
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    if not all(isinstance(one, nn.Module) for one in modules):
        raise ValueError(
            f"module={module!r}: give an nn.Module, or a list of those that a pipeline rank runs"
        )
    return modules
