"""All ranks of a pipeline in one process: the real stages, executions and mailboxes, and a wire that is a dictionary.

Real ranks cost seconds to start and an interpreter each; a schedule of 8 ranks is 8 programs that this process can
carry out in turn, each as far as it gets without waiting. What is not here: the transport, and ``Pipeline`` around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave.comm import Axis, Message, Pending
from shardweave.pipeline import Action, Schedule, lower
from shardweave.pipeline.actions import Kind
from shardweave.pipeline.execution import Execution, Holds
from shardweave.pipeline.feed import Feed
from shardweave.pipeline.mailbox import Mailbox, Shapes
from shardweave.pipeline.programs import Exchange, Program, Run, Step
from shardweave.pipeline.stage import Loss, Split, Stage
from shardweave.pipeline.values import Value


class _Sent:
    """As gloo's sends: nobody knows whether it is over."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> bool:
        return True


class Wire:
    """Messages on their way, by source, destination and tag; one of each pair up in order.

    A message is read when it is received, as late as can be: who sent it must have left it alone until then.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, int, int, int], Tensor] = {}
        self._posted: Counter[tuple[str, int, int, int]] = Counter()

    def exchange(self, rank: int, messages: Sequence[Message]) -> list[Pending[Tensor]]:
        """As ``comm.exchange`` of that rank."""
        handles = []
        for message in messages:
            source, to = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
            number = self._posted[message.kind, source, to, message.tag]
            self._posted[message.kind, source, to, message.tag] += 1
            key = source, to, message.tag, number
            if message.kind == "send":
                self._under_way[key] = message.tensor
                handles.append(self.handle(message.tensor))
            else:
                handles.append(Pending([], partial(self._receive, key, message.tensor)))
        return handles

    def handle(self, tensor: Tensor) -> Pending[Tensor]:
        """That of a send."""
        return Pending([cast(Any, _Sent())], lambda: tensor)

    def _receive(self, key: tuple[int, int, int, int], buffer: Tensor) -> Tensor:
        sent = self._under_way.pop(key)
        assert sent.shape == buffer.shape
        assert sent.dtype == buffer.dtype
        with torch.no_grad():
            return buffer.copy_(sent)

    @property
    def sent(self) -> int:
        """Messages that were sent."""
        return sum(count for (kind, *_), count in self._posted.items() if kind == "send")

    @property
    def is_empty(self) -> bool:
        """Whether everything that was sent was received."""
        return not self._under_way


class Together:
    """The ranks of a pipeline, of which each has its own stages, shapes and mailbox."""

    def __init__(
        self,
        plan: Schedule,
        modules: Sequence[nn.Module],
        *,
        loss: Loss | None = None,
        tagged: bool = True,
        dynamic_shapes: bool = True,
        recompute: frozenset[int] = frozenset(),
        split: Split = "graph",
    ) -> None:
        """``modules``: those of all stages; otherwise as ``Pipeline``. ``tagged``: False is how NCCL pairs messages."""
        self.plan, self._tagged, self._recompute = plan, tagged, recompute
        self._programs = lower(plan) if tagged else tuple(map(_one_by_one, lower(plan)))
        self._stages = [
            {
                stage: Stage(modules[stage], stage, plan.num_stages, loss, split)
                for stage in plan.stages_of(rank)
            }
            for rank in range(plan.num_ranks)
        ]
        self._shapes = [Shapes(dynamic_shapes) for _ in range(plan.num_ranks)]
        self.sent = 0
        """Messages of the last step."""

    def step(
        self,
        inputs: Sequence[Value],
        targets: Sequence[Any] | None = None,
        *,
        scale: Tensor | float = 1.0,
        arguments: Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
    ) -> Tensor | None:
        """The sum of the losses, from whichever rank has it; no other has any."""
        feed, wire = Feed(inputs, targets, arguments, scale, seed), Wire()
        ranks = range(self.plan.num_ranks)
        mailboxes = [self._mailbox(rank, wire) for rank in ranks]
        executions = [Execution(self._stages[rank], mailboxes[rank], feed, self._recompute) for rank in ranks]
        with ExitStack() as held:
            holds = [held.enter_context(Holds(self._stages[rank], self._programs[rank])) for rank in ranks]
            self._in_turn(
                [execution.steps(self._programs[r], holds[r]) for r, execution in enumerate(executions)]
            )
        assert wire.is_empty
        self.sent = wire.sent
        for mailbox in mailboxes:
            mailbox.finish()
        last = self.plan.rank_of_stage[-1]
        assert all(execution.total is None for rank, execution in enumerate(executions) if rank != last)
        return executions[last].total

    def _mailbox(self, rank: int, wire: Wire) -> Mailbox:
        size = self.plan.num_ranks
        group = cast(dist.ProcessGroup, object())  # nobody communicates over it
        axis = Axis("pp", tuple(range(size)), rank, group if size > 1 else None)
        return Mailbox(
            axis,
            self._shapes[rank],
            torch.device("cpu"),
            tagged=self._tagged,
            exchange=partial(wire.exchange, rank),
        )

    def _in_turn(self, programs: Sequence[Any]) -> None:
        """Carries all out, each as far as it gets, until none goes on."""
        posted: set[Action] = set()
        ahead: list[Step | None] = [next(program, None) for program in programs]
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(programs):
                while (step := ahead[rank]) is not None and self._is_ready(rank, step, posted):
                    ahead[rank] = next(program, None)  # carries ``step`` out
                    moved = True
                    if isinstance(step, Exchange):
                        posted.update(transfer.action for transfer in step.transfers if transfer.is_send)
        assert ahead == [None] * len(programs), f"stuck in front of {ahead}"

    def _is_ready(self, rank: int, step: Step, posted: set[Action]) -> bool:
        if isinstance(step, Exchange):
            # Without tags a header is waited for where it is posted.
            waits = not self._tagged and self._shapes[rank].headers
            heads = [t.action for t in step.transfers if not t.is_send and t.action.kind == "F"]
            return not waits or all(action in posted for action in heads)
        if not isinstance(step, Run):
            return True
        neighbour, made = _comes_from(step.action)
        if not 0 <= neighbour < self.plan.num_stages or self.plan.rank_of_stage[neighbour] == rank:
            return True
        return any(Action(kind, neighbour, step.action.micro_batch) in posted for kind in made)


def _comes_from(action: Action) -> tuple[int, tuple[Kind, ...]]:
    """The stage that makes what an action is given, and by which kinds of work."""
    if action.kind == "F":
        return action.stage - 1, ("F",)
    return (action.stage + 1, ("B", "I")) if action.is_backward else (-1, ())


def _one_by_one(program: Program) -> Program:
    """As the mailbox posts without tags: a header that is waited for may need the send in front of it."""
    steps: list[Step] = []
    for step in program:
        steps += [Exchange((one,)) for one in step.transfers] if isinstance(step, Exchange) else [step]
    return tuple(steps)
