"""The runner: a schedule, carried out over a list of modules.

A training loop stays the caller's. Where it said ``loss(model(x), y).backward()`` it says
``pipeline.step(inputs, targets)``; optimizer, learning rate and data are its own business::

    stages   partition(costs, stages)          who holds what
    plan     schedule("1f1b", ...)             in which order
    step     Pipeline(modules, axis, plan)     forwards, backwards and messages of one step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave.comm import Axis, set_sharding, sharding_of

from .agreement import agree, fingerprint
from .builders.forward_only import forward_only
from .execution import Execution, Holds
from .feed import Feed
from .lowering import Program, lower
from .mailbox import Mailbox, Shapes
from .schedules import Schedule
from .stage import Loss, Stage
from .values import Value

__all__ = ["Pipeline"]


class Pipeline:
    """Runs a schedule over the stages that this rank holds.

    Every rank of ``axis`` builds one with the modules of its own stages (``schedule.stages_of(axis.rank)``)
    and the same schedule, and calls the same methods in the same order. On an axis of one rank the same code
    runs without a message.

    Stages are called as ``module(value, **keywords)``, or ``module(*values, **keywords)`` when the stage
    before returned a tuple. They pass on a tensor or a tuple of tensors; integer and boolean tensors carry
    no gradient. What a stage returned must not be changed in place by itself later: it may still be on its
    way. What a stage received may be (``nn.ReLU(inplace=True)`` in front).

    Gradients of all micro-batches add up in ``parameter.grad``, in ascending order. Through
    ``comm.gradient_work`` a parameter's gradient counts as final with the last backward of its stage, so that
    an optimizer can reduce it while other stages still work. The pipeline records in every parameter's
    ``Sharding`` that other ranks of ``axis`` hold other parameters; parameters that several ranks share are
    marked with :func:`tie`.
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
                each other before every step: faster, and stricter.
            device: where received tensors live; ``None``: where the first parameter is, else the CPU.

        Raises:
            ValueError: modules or schedule do not fit the axis, or the schedule is invalid.
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
        schedule.validate()
        self.axis, self.schedule = axis, schedule
        self.stages = {
            index: Stage(module, index, schedule.num_stages, loss)
            for index, module in zip(indices, modules, strict=True)
        }
        self._has_loss = loss is not None
        self._device = torch.device(device) if device is not None else _device_of(modules)
        self._tagged = _honours_tags(axis)
        self._program = lower(schedule)[axis.rank]
        self._plan = fingerprint(schedule)
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
    ) -> Tensor | None:
        """Forwards and backwards of one step; gradients are added to ``parameter.grad``.

        Args:
            inputs: the micro-batches, each a tensor or a tuple of tensors; needed on the rank with stage 0,
                not used on others, which may pass the same or nothing.
            targets: one per micro-batch, handed to ``loss``; needed on the rank with the last stage.
            scale: each loss is multiplied by it before the backward: one over the number of tokens of the
                whole batch, say. It does not change what is returned.
            arguments: per micro-batch, keyword arguments for the call of every stage of this rank.

        Returns:
            The sum of all losses, detached, a 0-d tensor in float32 or wider, on the rank with the last
            stage; ``None`` on the others.

        Raises:
            ValueError: autograd is off, or a number of inputs, targets or arguments other than that of
                micro-batches, before the first message and, unless shapes are fixed already, on every rank;
                or a value between stages that cannot be passed on.
        """
        feed = Feed(inputs, targets, arguments, scale)
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

    def _forward_only(self, mode: str, feed: Feed, micro_batches: int | None) -> Execution:
        count = self.schedule.num_micro_batches if micro_batches is None else micro_batches
        if count < 1:
            raise ValueError(f"{mode}: micro_batches is {count}; it has to be 1 or more")
        forwards = forward_only(self.schedule, count)
        with torch.no_grad():
            return self._execute(mode, lower(forwards)[self.axis.rank], fingerprint(forwards), feed, count)

    def _execute(self, mode: str, program: Program, plan: int, feed: Feed, micro_batches: int) -> Execution:
        shapes = self._shapes[mode]

        def check() -> None:
            if mode == "step" and not torch.is_grad_enabled():
                raise ValueError(
                    "step() runs backwards and autograd is off here: call evaluate(), which runs forwards only, "
                    "or call step() outside of torch.no_grad() and torch.inference_mode()"
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
        execution = Execution(self.stages, mailbox, feed)
        if mode == "predict" and self._is_last:
            execution.outputs = []
        with Holds(self.stages, program) as holds:
            execution.run(program, holds)
        shapes.settled = True
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
