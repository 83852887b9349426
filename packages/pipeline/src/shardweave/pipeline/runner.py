"""The runner: a schedule, carried out over a list of modules.

A training loop stays the caller's. Where it said ``loss(model(x), y).backward()`` it says
``pipeline.step(inputs, targets)``; optimizer, learning rate and data are its own business::

    stages   partition(costs, stages)          who holds what
    plan     schedule("1f1b", ...)             in which order
    step     Pipeline(modules, axis, plan)     forwards, backwards and messages of one step
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, set_sharding, sharding_of

from .agreement import agree, fingerprint
from .builders.forward_only import forward_only
from .execution import Execution, Holds
from .feed import Feed
from .lowering import lower
from .mailbox import Mailbox, Shapes
from .programs import Program
from .schedules import Schedule
from .stage import Loss, Split, Stage
from .turns import Turns
from .values import Value

__all__ = ["Pipeline"]


class Pipeline:
    """Runs a schedule over the stages that this rank holds.

    Every rank of ``axis`` builds one with the modules of its own stages (``schedule.stages_of(axis.rank)``)
    and the same schedule, and calls the same methods in the same order. On an axis of one rank the same code
    runs without a message.

    Stages are called as ``module(value, **keywords)``, as ``module(*values, **keywords)`` when the stage before
    returned a tuple, and as ``module(**values, **keywords)`` when it returned a dict. They pass on a tensor, a
    tuple or a dict of tensors; integer and boolean tensors carry no gradient. What a stage returned must not be
    changed in place by itself later: it may still be on its way. What a stage received may be
    (``nn.ReLU(inplace=True)`` in front). The memory of an output goes when it has been sent, unless the stage
    itself saved it for its backward.

    Where the schedule has a backward in two halves, ``I`` and ``W``, weight gradients are left to ``W`` in any
    module: by the layer itself through ``comm.WeightGradients`` (as those of ``shardweave.tensor_parallel`` do),
    else by torch's graph, if the parameter enters one matrix product, convolution or embedding and nothing else.
    All others are computed in ``I``. See ``split``.

    Gradients of all micro-batches add up in ``parameter.grad``, in the schedule's order. Through
    ``comm.gradient_work`` a parameter's gradient counts as final with the last backward of its stage, or the last
    ``W`` of those it was left to, so that an optimizer can reduce it while other stages still work. The pipeline
    records in every parameter's ``Sharding`` that other ranks of ``axis`` hold other parameters; parameters that
    several ranks share are marked with :func:`tie`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        axis: Axis,
        schedule: Schedule,
        *,
        loss: Loss | None = None,
        dynamic_shapes: bool = True,
        device: torch.device | str | None = None,
        recompute: bool | Collection[int] = False,
        split: Split = "graph",
    ) -> None:
        """
        Args:
            modules: one module per stage of this rank, in the order of the stages.
            axis: the pipeline axis.
            schedule: from :func:`schedule`; for as many ranks as the axis has.
            loss: ``loss(output, target)``, the sum over a micro-batch. ``None``: the last stage returns it
                itself, and there are no targets.
            dynamic_shapes: whether micro-batches may differ in shape. If not, shapes are fixed by the first
                step, messages go without headers and can all be posted ahead, and ranks do not check with
                each other before every step: faster, and stricter. Where they may, messages that were alike in the last
                two steps go without a header as well, on gloo.
            device: where received tensors live; ``None``: where the first parameter is, else the CPU.
            recompute: stages (all with ``True``) that keep their inputs instead of their activations, and run
                forward once more in front of their backward, with the same random numbers of torch's generators. On the
                last stage that includes the loss. A collection may name stages of other ranks.
            split: what ``I`` leaves to ``W``: ``graph`` as above; ``layers``: what layers offer themselves only, for
                modules with hooks that must run once; ``none``: nothing, ``I`` is the whole backward.

        Raises:
            ValueError: modules or schedule do not fit the axis, the schedule is invalid, ``recompute`` names a
                stage that is not there, or two parameters of this rank have one canonical name.
        """
        if schedule.num_ranks != axis.size:
            raise ValueError(
                f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and axis {axis.name!r} has "
                f"{axis.size}; build it with ranks={axis.size}"
            )
        indices = schedule.stages_of(axis.rank)
        modules = list(modules)
        if len(modules) != len(indices):
            raise ValueError(
                f"{len(modules)} modules for rank {axis.rank} of axis {axis.name!r}, which holds the stages "
                f"{list(indices)}; pass one module per stage"
            )
        if split not in get_args(Split):
            raise ValueError(f"split is {split!r}; choose one of {', '.join(map(repr, get_args(Split)))}")
        schedule.validate()
        self._recompute = _recomputed(recompute, schedule.num_stages)
        _check_names(modules)
        self.axis, self.schedule = axis, schedule
        self.stages = {
            index: Stage(module, index, schedule.num_stages, loss, split)
            for index, module in zip(indices, modules, strict=True)
        }
        self._has_loss = loss is not None
        self._device = torch.device(device) if device is not None else _device_of(modules)
        self._tagged = _honours_tags(axis)
        self._program = lower(schedule)[axis.rank]
        self._plan = fingerprint(schedule)
        self._turns = Turns(axis.size > 1)
        # By number of micro-batches: planned once, not for every evaluation and every token.
        self._forwards: dict[int, tuple[Program, int]] = {}
        self._shapes = {mode: Shapes(dynamic_shapes) for mode in ("step", "evaluate", "predict")}
        for module in modules:
            for parameter in module.parameters():
                _record_exclusive(parameter, axis)

    def step(
        self,
        inputs: Sequence[Value] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        scale: Tensor | float = 1.0,
        arguments: Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
    ) -> Tensor | None:
        """Forwards and backwards of one step; gradients are added to ``parameter.grad``.

        Args:
            inputs: the micro-batches, each a tensor, a tuple or a dict of tensors; needed on the rank with stage
                0, not used on others, which may pass the same or nothing.
            targets: one per micro-batch, handed to ``loss``; needed on the rank with the last stage.
            scale: each loss is multiplied by it before the backward: one over the number of tokens of the
                whole batch, say. It does not change what is returned.
            arguments: per micro-batch, keyword arguments for the call of every stage of this rank.
            seed: of this step. With it torch's default generators are seeded by ``(seed, stage, micro-batch)``
                around every call of a stage, and continue behind it as if nothing had been drawn: what dropout takes is
                the same in every schedule. Give another in each step. ``None``: modules draw from the generators as
                they are, in the order of the schedule.

        Returns:
            The sum of all losses, detached, a 0-d tensor in float32 or wider, on the rank with the last
            stage; ``None`` on the others. :meth:`share` tells it to all.

        Raises:
            ValueError: autograd is off, the schedule has no backwards, or a number of inputs, targets or
                arguments other than that of micro-batches, before the first message and, unless shapes are fixed
                already, on every rank; a value between stages that cannot be passed on; a call while another one is
                running, or, on an axis of several ranks, after one that ended with an error in the middle.
        """
        feed = Feed(inputs, targets, arguments, scale, seed)
        return self._execute("step", self._program, self._plan, feed, self.schedule.num_micro_batches).total

    def evaluate(
        self,
        inputs: Sequence[Value] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        micro_batches: int | None = None,
        arguments: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor | None:
        """Forwards only, without autograd; arguments and result as in :meth:`step`.

        ``micro_batches`` may differ from the schedule's; it is the same on all ranks. Modules stay in the
        mode they are in: call ``module.eval()`` before if that is meant.
        """
        return self._forward_only("evaluate", Feed(inputs, targets, arguments), micro_batches).total

    def predict(
        self,
        inputs: Sequence[Value] | None = None,
        *,
        micro_batches: int | None = None,
        arguments: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Value] | None:
        """The last stage's outputs, one per micro-batch, on the rank that holds it; ``None`` on the others.

        As :meth:`evaluate`, without loss and targets.
        """
        return self._forward_only("predict", Feed(inputs, None, arguments), micro_batches).outputs

    def share(self, total: Tensor | None) -> Tensor:
        """What :meth:`step` or :meth:`evaluate` returned on the rank with the last stage, on every rank.

        All ranks of the axis call it, with what they got. Returns a 0-d tensor in float64, which holds it exactly.
        """
        value = torch.zeros((), dtype=torch.float64, device=self._device)
        if total is not None:
            value.copy_(total)
        return comm.broadcast(value, self.axis, self.schedule.rank_of_stage[-1])

    def _forward_only(self, mode: str, feed: Feed, micro_batches: int | None) -> Execution:
        count = self.schedule.num_micro_batches if micro_batches is None else micro_batches
        if count < 1:
            raise ValueError(f"{mode}: micro_batches is {count}; it has to be 1 or more")
        if count not in self._forwards:
            forwards = forward_only(self.schedule, count)
            self._forwards[count] = lower(forwards)[self.axis.rank], fingerprint(forwards)
        program, plan = self._forwards[count]
        with torch.no_grad():
            return self._execute(mode, program, plan, feed, count)

    def _execute(self, mode: str, program: Program, plan: int, feed: Feed, micro_batches: int) -> Execution:
        shapes = self._shapes[mode]
        self._turns.check(mode)

        def check() -> None:
            if mode == "step" and not torch.is_grad_enabled():
                raise ValueError(
                    "step() runs backwards and autograd is off here: call evaluate(), which runs forwards only, "
                    "or call step() outside of torch.no_grad() and torch.inference_mode()"
                )
            if mode == "step" and not self.schedule.training:
                raise ValueError(
                    f"step() runs backwards and schedule {self.schedule.name!r} has none: call evaluate() or "
                    "predict(), or build the pipeline with a schedule that trains"
                )
            feed.check(
                micro_batches,
                first=0 in self.stages,
                needs_targets=self._has_loss and mode != "predict" and self._is_last,
                takes_targets=self._has_loss,
            )

        refusal = _refusal(check)
        if shapes.headers:
            agree(self.axis, plan, refusal, self._device)
        elif refusal is not None:
            raise refusal
        mailbox = Mailbox(self.axis, shapes, self._device, tagged=self._tagged)
        execution = Execution(self.stages, mailbox, feed, self._recompute)
        if mode == "predict" and self._is_last:
            execution.outputs = []
        with self._turns.turn(mode), Holds(self.stages, program) as holds:
            execution.run(program, holds)
        mailbox.finish()
        return execution

    @property
    def _is_last(self) -> bool:
        return self.schedule.num_stages - 1 in self.stages


def _refusal(check: Callable[[], None]) -> ValueError | None:
    """The error of a check, to be raised once the other ranks know."""
    try:
        check()
    except ValueError as error:
        return error
    return None


def _recomputed(recompute: bool | Collection[int], num_stages: int) -> frozenset[int]:
    """The stages that are recomputed, of all ranks."""
    if isinstance(recompute, bool):
        return frozenset(range(num_stages)) if recompute else frozenset()
    wrong = sorted(stage for stage in recompute if not 0 <= stage < num_stages)
    if wrong:
        raise ValueError(
            f"recompute={sorted(recompute)} names stage {wrong[0]} of {num_stages}; name stages from 0 to "
            f"{num_stages - 1}, or pass True for all"
        )
    return frozenset(recompute)


def _check_names(modules: Sequence[nn.Module]) -> None:
    """Raises ValueError when two of a rank's stages hold copies of what is to be one parameter."""
    named: dict[str, Tensor] = {}
    for module in modules:
        for parameter in module.parameters():
            name = sharding_of(parameter).name
            if name and named.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"two parameters of this rank have the canonical name {name!r}; where two of its stages share a "
                    "parameter (an embedding and a head tied in a V placement), give both modules the same "
                    "nn.Parameter object: its gradients add up there"
                )


def _record_exclusive(parameter: Tensor, axis: Axis) -> None:
    record = sharding_of(parameter)
    if axis not in record.exclusive:
        set_sharding(parameter, replace(record, exclusive=(*record.exclusive, axis)))


def _device_of(modules: Sequence[nn.Module]) -> torch.device:
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")


def _honours_tags(axis: Axis) -> bool:
    """Whether messages are matched by tag: on gloo yes, on NCCL by order alone."""
    return axis.group is None or dist.get_backend(axis.group) == "gloo"
