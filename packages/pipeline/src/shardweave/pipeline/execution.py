"""One step: a program carried out with real tensors.

This is the only place where a schedule meets modules and messages, and it knows no schedule by name: it
executes what the program says. Everything a step keeps alive is held here and goes with it, also when the
step fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardweave.comm import GradientWork, RandomFork, WeightGradients, gradient_work

from .actions import Action
from .feed import Feed
from .mailbox import Mailbox
from .programs import Exchange, Program, Run, Step
from .recompute import Recompute
from .stage import Received, Running, Stage, enter
from .values import Signature, Value, parts_of

__all__ = ["Execution", "Holds"]


class Holds:
    """Says of every parameter that its gradient is not final, until the last backward of its stage; and, where a
    backward comes in two halves, that it may be put off.

    Entered before the first action; :meth:`backward_of` is called before each backward. On leaving, also by
    an exception, nothing is held any more, nor promised.
    """

    def __init__(self, stages: Mapping[int, Stage], program: Program) -> None:
        self._stages = stages
        actions = [step.action for step in program if isinstance(step, Run)]
        self._ahead = Counter(action.stage for action in actions if action.is_backward)
        self._halved = {
            action.stage for action in actions if action.kind == "I" and stages[action.stage].puts_off
        }
        self._held: dict[int, list[GradientWork]] = {}
        self._promised: list[GradientWork] = []

    def __enter__(self) -> Holds:
        for index in self._ahead:
            self._held[index] = [gradient_work(parameter) for parameter in self._stages[index].parameters]
            for work in self._held[index]:
                work.hold()
            if index in self._halved:
                self._promised += self._held[index]
        for work in self._promised:
            work.promise()
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
        while self._promised:
            self._promised.pop().retract()

    def _release(self, stage: int) -> None:
        for work in self._held.pop(stage):
            work.release()


class _Made(NamedTuple):
    """What one call of a stage gave."""

    leaves: tuple[Tensor, ...]
    output: Value
    signature: Signature
    loss: Tensor | None
    """On the last stage, when a loss is wanted."""


class Execution:
    """The state of one step on one rank. ``recompute``: stages that keep no activations."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        mailbox: Mailbox,
        feed: Feed,
        recompute: frozenset[int] = frozenset(),
    ) -> None:
        self._stages, self._mailbox, self._feed, self._recompute = stages, mailbox, feed, recompute
        self._made: tuple[tuple[int, int], _Made] | None = None
        self._running: dict[tuple[int, int], Running] = {}
        self._recomputes: dict[tuple[int, int], Recompute] = {}
        self._deferred: dict[tuple[int, int], WeightGradients] = {}
        self._seeds: dict[tuple[torch.dtype, torch.device, torch.Size], Tensor] = {}
        self.total: Tensor | None = None
        """The sum of the losses so far, detached, in float32 or wider; ``None`` without the last stage."""
        self.outputs: list[Value] | None = None
        """Set to a list to have the last stage's outputs collected instead of their losses."""

    def run(self, program: Program, holds: Holds) -> None:
        """Carries the program out."""
        for _ in self.steps(program, holds):
            pass

    def steps(self, program: Program, holds: Holds) -> Iterator[Step]:
        """:meth:`run` in pieces: gives each step before it is carried out, which the next ``next`` does.

        With it one process can run the programs of many ranks in turn.
        """
        try:
            for step in program:
                yield step
                if isinstance(step, Exchange):
                    self._mailbox.post(step.transfers)
                    continue
                self._keep()
                if isinstance(step, Run):
                    self._act(step.action, holds)
                else:
                    self._mailbox.settle(step.actions)
        finally:
            for queue in self._deferred.values():
                queue.drop()  # of a step that failed: nobody is going to run them

    def _act(self, action: Action, holds: Holds) -> None:
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            self._deferred[action.stage, action.micro_batch].run()
            del self._deferred[action.stage, action.micro_batch]
        else:
            holds.backward_of(action.stage)
            self._backward(action)

    def _forward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.micro_batch)
        received = self._received(action)
        if action.stage in self._recompute and torch.is_grad_enabled():
            again = Recompute(stage.module, received, f"stage {action.stage}")
            with again.first():
                made = self._call(action, received)
            self._recomputes[key] = again
        else:
            made = self._call(action, received)
            if torch.is_grad_enabled():
                self._made = key, made
        if not stage.is_last:
            tensors = parts_of(made.output)
            # Detached: the next stage's graph begins with its own leaves, also when it is on this rank.
            self._mailbox.put(action, tuple([tensor.detach() for tensor in tensors]), made.signature)
        elif made.loss is not None:
            self._add(made.loss.detach())
        elif self.outputs is not None:
            self.outputs.append(made.output)

    def _add(self, loss: Tensor) -> None:
        """To the sum of losses, in float32 or wider."""
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32)) if loss.itemsize < 4 else loss
        value = wide.reshape(()) if wide.dim() else wide
        self.total = value.clone() if self.total is None else self.total + value

    def _received(self, action: Action) -> Received:
        if action.stage == 0:
            # The caller's inputs are not ours: their gradients, if they have any, stay where they are.
            tensors, names = self._feed.input(action.micro_batch)
            return Received(tensors, (), names)
        source = Action("F", action.stage - 1, action.micro_batch)
        tensors = self._mailbox.take(source)
        signature = self._mailbox.signature(source)
        # The memory of what arrived as a message is this value's alone; a recomputed stage watches its version.
        is_own = source.stage not in self._stages and action.stage not in self._recompute
        return Received(tensors, signature.wanted, signature.names, is_own)

    def _call(self, action: Action, received: Received) -> _Made:
        """The stage's forward, and on the last stage the loss."""
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        leaves, inputs = enter(received)
        seed = self._feed.seed
        fork = None if seed is None else RandomFork.seeded(seed, "pipeline", action.stage, micro_batch)
        try:
            output, signature = stage.call(inputs, received.names, self._feed.keywords(micro_batch))
            loss = None
            if stage.is_last and self.outputs is None:
                loss = stage.loss_of(output, self._feed.target(micro_batch))
        finally:
            if fork is not None:
                fork.end()
        return _Made(leaves, output, signature, loss)

    def _keep(self) -> None:
        """Keeps what the last forward's backward needs. Not before its output is on its way: somebody waits for it."""
        if self._made is not None:
            (index, micro_batch), made = self._made
            self._made = None
            self._running[index, micro_batch] = self._kept(self._stages[index], made)

    def _kept(self, stage: Stage, made: _Made) -> Running:
        """What backward needs of a call."""
        outputs = (made.loss,) if made.loss is not None else () if stage.is_last else parts_of(made.output)
        edges = tuple([get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad])
        seeds: tuple[Tensor, ...] = ()
        if made.loss is not None and edges:
            seeds = (self._seed(made.loss),)
        return Running(made.leaves, edges, seeds)

    def _seed(self, loss: Tensor) -> Tensor:
        """The gradient of a loss, one tensor for all of a kind: nobody writes to it."""
        kind = (loss.dtype, loss.device, loss.shape)
        seed = self._seeds.get(kind)
        if seed is None:
            one = torch.ones_like(loss, requires_grad=False)
            seed = self._seeds[kind] = (one * self._feed.scale).to(one.dtype).reshape(one.shape)
        return seed

    def _backward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.micro_batch)
        if key in self._recomputes:
            with self._recomputes.pop(key).again() as received:
                running = self._kept(stage, self._call(action, received))
        else:
            running = self._running.pop(key)
        if stage.is_last:
            gradients = running.seeds
        else:
            gradients = self._mailbox.take_gradient(action.stage + 1, action.micro_batch)
        if action.kind == "I":
            results, self._deferred[key] = stage.input_backward(running, gradients)
        else:
            results = stage.backward(running, gradients)
        if action.stage > 0:
            self._mailbox.put(action, results)
