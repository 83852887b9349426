"""What a step keeps alive, and for how long: graphs until their last half, outputs until they were sent."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packages.pipeline.tests import together
from packages.pipeline.tests.together import Together, Wire
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardweave.comm import Mesh, Message, Pending, WeightGradients, gradient_work
from shardweave.pipeline import Pipeline, Schedule, schedule
from shardweave.pipeline.split import backward_of_inputs


class Token:
    """Lives as long as the graph of one forward."""


class Graphs:
    """How many graphs are alive, and were at most."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.most = 0

    def token(self) -> Token:
        token = Token()
        self.alive.add(token)
        self.most = max(self.most, len(self.alive))
        return token


class Keep(torch.autograd.Function):
    """The identity, with a token in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graphs: Graphs) -> Tensor:
        ctx.token = graphs.token()
        return x + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Watched(nn.Module):
    """A product whose graph is counted, the token below what is put off."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 5), nn.Parameter(torch.ones(()))
        self.graphs = graphs

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = Keep.apply(x * self.scale, self.graphs)  # type: ignore[no-untyped-call]
        result: Tensor = self.linear(kept)
        return result


def most_held(plan: Schedule, rank: int) -> int:
    """Forwards whose last half is still to come, at most."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate(change[action.kind] for action in plan.actions[rank]))


def live_bytes() -> int:
    gc.collect()
    return sum(its.numel() * its.element_size() for its in gc.get_objects() if type(its) is Tensor)


@pytest.mark.ranks(2)
def test_b045_memory_grows_neither_with_steps_nor_with_micro_batches() -> None:
    mesh = Mesh(pp=2)
    for name in ("1f1b", "zb-h1", "zb-v"):
        plan = schedule(name, ranks=2, micro_batches=8)
        graphs = Graphs()
        modules = nn.ModuleList(Watched(graphs) for _ in plan.stages_of(mesh.pp.rank))
        pipeline = Pipeline(
            list(modules), mesh.pp, plan, loss=lambda output, target: (output - target).square().sum()
        )
        optimizer = torch.optim.SGD(modules.parameters(), lr=1e-4)
        sizes = []
        for step in range(30):
            value = float("inf") if step == 12 else 1.0
            pipeline.step([torch.full((2, 5), value)] * 8, [torch.zeros(2, 5)] * 8)
            finite = all(
                bool(its.grad.isfinite().all()) for its in modules.parameters() if its.grad is not None
            )
            assert finite == (step != 12)
            if finite:
                optimizer.step()
            optimizer.zero_grad()
            assert len(graphs.alive) == 0
            sizes.append(live_bytes() if step in (5, 29) else 0)
        assert sizes[5] == sizes[29]
        assert graphs.most == most_held(plan, mesh.pp.rank)
        if name == "1f1b":
            assert graphs.most == 2 - mesh.pp.rank


def test_nothing_stays_of_halves_that_ran_or_were_dropped() -> None:
    for run in (True, False):
        graphs, queue = Graphs(), WeightGradients()
        module = Watched(graphs)
        output = module(torch.randn(2, 5))
        backward_of_inputs(
            [get_gradient_edge(output)], [output.detach()], set(map(id, module.parameters())), queue
        )
        del output
        assert len(graphs.alive) == 1
        queue.run() if run else queue.drop()
        assert len(graphs.alive) == 0
        assert gradient_work(module.linear.weight).final


def test_a_recomputed_stage_has_one_graph_at_a_time() -> None:
    plan = schedule("gpipe", ranks=2, micro_batches=6)
    for recompute, most in ((frozenset[int](), 6), (frozenset([0, 1]), 1)):
        graphs = [Graphs(), Graphs()]
        modules = [Watched(its) for its in graphs]
        pair = Together(plan, modules, loss=lambda output, target: output.sum(), recompute=recompute)
        pair.step([torch.randn(2, 5) for _ in range(6)], [None] * 6)
        assert [its.most for its in graphs] == [most, most]


class WatchedWire(Wire):
    """Counts the values of one rank that were sent and are still alive."""

    def __init__(self, graphs: Graphs, *, tells: bool) -> None:
        super().__init__()
        self._graphs, self._tells = graphs, tells

    def handle(self, tensor: Tensor) -> Pending[Tensor]:
        return Pending.ready(tensor) if self._tells else super().handle(tensor)

    def exchange(self, rank: int, messages: Sequence[Message]) -> list[Pending[Tensor]]:
        for message in messages:
            if message.kind == "send" and rank == 0 and message.tensor.is_floating_point():
                token = self._graphs.token()
                # As long as the memory: whatever refers to it shares the storage.
                weakref.finalize(message.tensor.untyped_storage(), lambda token=token: None)  # type: ignore[misc]
        return super().exchange(rank, messages)


class Add(nn.Module):
    """Saves nothing for its backward, and looks there how many sent values are alive."""

    def __init__(self, sent: Graphs) -> None:
        super().__init__()
        self.bias, self.sent = nn.Parameter(torch.zeros(3)), sent
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        output = x + self.bias
        output.register_hook(self._look)
        return output

    def _look(self, gradient: Tensor) -> None:
        self.seen.append(len(self.sent.alive))


def test_the_memory_of_an_output_goes_when_it_has_been_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In GPipe the first gradient that comes back says that all have arrived; their backwards are still to come.

    NCCL tells of each when it is over.
    """
    for tells, first in ((False, 8), (True, 0)):
        sent = Graphs()
        monkeypatch.setattr(together, "Wire", lambda sent=sent, tells=tells: WatchedWire(sent, tells=tells))
        modules = [Add(sent) for _ in range(3)]
        plan = schedule("gpipe", ranks=3, micro_batches=8)
        three = Together(plan, modules, loss=lambda output, target: output.sum(), dynamic_shapes=False)
        three.step([torch.randn(3) for _ in range(8)], [None] * 8)
        assert modules[0].seen == [first] + [0] * 7
