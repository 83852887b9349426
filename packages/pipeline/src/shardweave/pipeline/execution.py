"""One step: a program carried out with real tensors.

This is the only place where a schedule meets modules and messages, and it knows no schedule by name: it
executes what the program says. Everything a step keeps alive is held here and goes with it, also when the
step fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor

from shardweave.comm import GradientWork, WeightGradients, gradient_work

from .actions import Action
from .feed import Feed
from .lowering import Exchange, Program, Run, Settle
from .mailbox import Mailbox
from .stage import Running, Stage, alias
from .values import Value

__all__ = ["Execution", "Holds"]


class Holds:
    """Says of every parameter that its gradient is not final, until the last backward of its stage.

    Entered before the first action; :meth:`backward_of` is called before each backward. On leaving, also by
    an exception, nothing is held any more.
    """

    def __init__(self, stages: Mapping[int, Stage], program: Program) -> None:
        self._stages = stages
        actions = [step.action for step in program if isinstance(step, Run)]
        self._ahead = Counter(action.stage for action in actions if action.is_backward)
        self._held: dict[int, list[GradientWork]] = {}

    def __enter__(self) -> Holds:
        for index in self._ahead:
            self._held[index] = [gradient_work(parameter) for parameter in self._stages[index].parameters]
            for work in self._held[index]:
                work.hold()
        return self

    def backward_of(self, stage: int) -> None:
        """The next backward of ``stage`` begins; in front of the last one its parameters are released."""
        self._ahead[stage] -= 1
        if self._ahead[stage] == 0:
            self._release(stage)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stage in tuple(self._held):
            self._release(stage)

    def _release(self, stage: int) -> None:
        for work in self._held.pop(stage):
            work.release()


class Execution:
    """The state of one step on one rank."""

    def __init__(self, stages: Mapping[int, Stage], mailbox: Mailbox, feed: Feed) -> None:
        self._stages, self._mailbox, self._feed = stages, mailbox, feed
        self._running: dict[tuple[int, int], Running] = {}
        self._deferred: dict[tuple[int, int], WeightGradients] = {}
        self.total: Tensor | None = None
        """The sum of the losses so far, detached, in float32 or wider; ``None`` without the last stage."""
        self.outputs: list[Value] | None = None
        """Set to a list to have the last stage's outputs collected instead of their losses."""

    def run(self, program: Program, holds: Holds) -> None:
        """Carries the program out."""
        for step in program:
            if isinstance(step, Exchange):
                self._mailbox.post(step.transfers)
            elif isinstance(step, Settle):
                self._mailbox.settle(step.actions)
            elif step.action.kind == "F":
                self._forward(step.action)
            elif step.action.kind == "W":
                self._deferred.pop((step.action.stage, step.action.micro_batch)).run()
            else:
                holds.backward_of(step.action.stage)
                self._backward(step.action)

    def _forward(self, action: Action) -> None:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        leaves, inputs = self._inputs(action)
        output, signature = stage.call(inputs, self._feed.keywords(micro_batch))
        if stage.is_last:
            kept = self._finish(stage, output, micro_batch)
        else:
            kept = (output,) if isinstance(output, Tensor) else output
            # Detached: the next stage's graph begins with its own leaves, also when it is on this rank.
            self._mailbox.put(action, tuple(tensor.detach() for tensor in kept), signature)
        if torch.is_grad_enabled():
            self._running[action.stage, micro_batch] = Running(leaves, kept)

    def _inputs(self, action: Action) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The leaves that this stage's backward fills, and what its module is called with."""
        if action.stage == 0:
            # The caller's inputs are not ours: their gradients, if they have any, stay where they are.
            return (), self._feed.input(action.micro_batch)
        source = Action("F", action.stage - 1, action.micro_batch)
        received = self._mailbox.take(source)
        wanted = [spec.requires_grad for spec in self._mailbox.signature(source).tensors]
        leaves = tuple(
            tensor.detach().requires_grad_(wants) for tensor, wants in zip(received, wanted, strict=True)
        )
        inputs = tuple(
            alias(leaf, tensor) if leaf.requires_grad else tensor
            for leaf, tensor in zip(leaves, received, strict=True)
        )
        return leaves, inputs

    def _finish(self, stage: Stage, output: Value, micro_batch: int) -> tuple[Tensor, ...]:
        """Takes the last stage's output; returns what its backward starts from."""
        if self.outputs is not None:
            self.outputs.append(output)
            return ()
        loss = stage.loss_of(output, self._feed.target(micro_batch))
        value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)).reshape(())
        self.total = value.clone() if self.total is None else self.total + value
        return (loss * self._feed.scale,)

    def _backward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.micro_batch)
        running = self._running.pop(key)
        if stage.is_last:
            gradients = tuple(torch.ones_like(loss) for loss in running.outputs if loss.requires_grad)
        else:
            gradients = self._mailbox.take_gradient(action.stage + 1, action.micro_batch)
        if action.kind == "I":
            results, self._deferred[key] = stage.input_backward(running, gradients)
        else:
            results = stage.backward(running, gradients)
        if action.stage > 0:
            self._mailbox.put(action, results)
