"""The two trainings that a program runs: this rank's part of the sharded one, and all ranks' parts of the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD as PlainSGD
from torch.optim import Optimizer

from shardweave.comm import Mesh
from shardweave.zero import ZeroOptimizer

from .checks import any_not_finite, assert_close, assert_live, assert_same_parameters, assert_same_step
from .losses import Loss, loss_of
from .net import Interrupted, Net, inputs, net_of
from .settings import SGD, Setting

__all__ = ["Graphs", "Pair", "Side"]

O = TypeVar("O", bound=Optimizer)  # noqa: E741

GRAPH_IS_GONE = ("modified by an inplace", "second time", "not require grad")
"""What torch says of a graph that cannot run backward: parameters were written or frozen, or it has run already."""


class Side(Generic[O]):
    """A net, its optimizer, and the ranks whose losses are computed on it."""

    def __init__(self, seed: int, ranks: Sequence[int], make: Callable[[Net], O]) -> None:
        self.net = net_of(seed)
        self.ranks = ranks
        self.optimizer = make(self.net)
        self._make = make

    def rebuild(self) -> None:
        """Another optimizer for the same net."""
        self.optimizer = self._make(self.net)

    @property
    def factor(self) -> float:
        """Of a loss, before its backward pass: gradients are averaged over the ranks."""
        if isinstance(self.optimizer, ZeroOptimizer):
            return self.optimizer.loss_scale
        return 1 / len(self.ranks)

    def losses(self, seed: int, micro: int, loss: Loss) -> list[Tensor]:
        """One forward pass for each rank."""
        return [loss_of(self.net, loss, inputs(seed, micro, rank)) for rank in self.ranks]

    def backward(self, losses: Sequence[Tensor], *, retain_graph: bool = False) -> str:
        """One backward pass for each rank; what went wrong with a graph, in torch's words, or nothing."""
        try:
            for loss in losses:
                (loss * self.factor).backward(retain_graph=retain_graph)
        except RuntimeError as error:
            known = [words for words in GRAPH_IS_GONE if words in str(error)]
            if not known or "max_live_parameters" in str(error):
                raise
            return "the graph is gone"
        return ""


@dataclass(frozen=True)
class Graphs:
    """Losses that wait for their backward pass."""

    sharded: Sequence[Tensor]
    plain: Sequence[Tensor]


class Pair:
    """Both sides of one program, what is pending on them, and what each operation may ask for."""

    def __init__(self, seed: int, setting: Setting, mesh: Mesh) -> None:
        self.seed, self.setting, self.axis = seed, setting, mesh.data
        self.sharded = Side(seed, [mesh.data.rank], self._zero(mesh))
        self.plain = Side(seed, range(mesh.data.size), lambda net: PlainSGD(net.parameters(), **SGD))
        self.pending: list[Graphs] = []
        self.micro = 0
        self._is_sharded = setting.stage == 3 and (mesh.shard if setting.copies else mesh.data).size > 1
        self._contexts = 0
        self._recorded = False
        """Whether graphs of gradients may need what is gathered, until the step."""
        self._failed = False
        """Whether a backward pass raised, and no forward pass came after it, which is what puts things in order."""

    def _zero(self, mesh: Mesh) -> Callable[[Net], ZeroOptimizer]:
        shard: dict[str, Any] = {"shard": mesh.shard} if self.setting.copies else {}

        def make(net: Net) -> ZeroOptimizer:
            return ZeroOptimizer(
                net.named_parameters(), torch.optim.SGD, data=mesh.data, module=net,
                stage=self.setting.stage, **SGD, **self.setting.options, **shard,
            )  # fmt: skip

        return make

    @property
    def sides(self) -> tuple[Side[ZeroOptimizer], Side[PlainSGD]]:
        """The sharded one and the plain one."""
        return self.sharded, self.plain

    @property
    def nets(self) -> tuple[Net, Net]:
        """Theirs."""
        return self.sharded.net, self.plain.net

    # -- passes ----------------------------------------------------------------------------------------

    def next_micro(self) -> int:
        """The number of a forward pass, which decides on its inputs."""
        self.micro += 1
        self._failed = False
        return self.micro

    def losses(self, loss: Loss) -> Graphs:
        """Forward passes on both sides, with equal values."""
        micro = self.next_micro()
        sharded, plain = (side.losses(self.seed, micro, loss) for side in self.sides)
        assert_close("the loss", sharded[0].detach(), plain[self.axis.rank].detach())
        return Graphs(sharded, plain)

    def backward(self, graphs: Graphs, *, retain_graph: bool = False) -> bool:
        """Backward passes on both sides. False: it could not be, on neither side, and all gradients are forgotten."""
        mine = self.sharded.backward(graphs.sharded, retain_graph=retain_graph)
        right = self.plain.backward(graphs.plain, retain_graph=retain_graph)
        assert mine == right, f"backward: {mine or 'ran'}, and in plain torch: {right or 'ran'}"
        if mine:
            self._failed = True
            self.zero_grad()
            self.pending.clear()
            return False
        # A backward pass through persistent units alone comes and goes unseen: another one is still awaited.
        awaited = 1 + self.setting.options["prefetch"] if self.pending and self.setting.persistent else 0
        idle = not (self._recorded or self._failed)
        self.check_live("after a backward pass", idle=idle, awaited=awaited)
        return True

    def fail(self, run: Callable[[Net, int], None]) -> None:
        """``run`` on both sides, for each rank of it, which raises on purpose."""
        for side in self.sides:
            for rank in side.ranks:
                try:
                    run(side.net, rank)
                except Interrupted:
                    continue
                raise AssertionError("an exception was lost")

    def fail_backward(self, run: Callable[[Net, int], None]) -> None:
        """:meth:`fail` in backward passes; their gradients are forgotten."""
        self.fail(run)
        self._failed = True
        self.zero_grad()

    @contextmanager
    def full_parameters(self, layer: int | None) -> Iterator[None]:
        """All parameters of a layer, or of the net, are there on the sharded side, too."""
        self._contexts += 1
        part = None if layer is None else self.sharded.net.layers[layer]
        try:
            with self.sharded.optimizer.full_parameters(part):
                yield
        finally:
            self._contexts -= 1

    def record_gradients(self) -> None:
        """There are graphs of gradients from now on, until the step."""
        self._recorded = True

    # -- steps -----------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forgets gradients on both sides."""
        for side in self.sides:
            side.optimizer.zero_grad()

    def step(self) -> None:
        """A step on both sides, skipped where a gradient is not finite; nothing is in use afterwards."""
        trained = [parameter for parameter in self.plain.net.parameters() if parameter.grad is not None]
        skipped = any_not_finite([p.grad for p in trained if p.grad is not None])
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self.setting.options["clip"] or 1e30))
        if not skipped:
            self.plain.optimizer.step()
        self.plain.optimizer.zero_grad()
        self.sharded.optimizer.step()
        assert_same_step(self.sharded.optimizer, skipped=skipped, norm=norm)
        self._recorded = self._failed = False
        self.check_live("after a step", idle=True)

    def start_anew(self) -> None:
        """New optimizers for the same nets; nothing is pending."""
        self.zero_grad()
        self.pending.clear()
        for side in self.sides:
            side.rebuild()
        self._recorded = False

    # -- checks ----------------------------------------------------------------------------------------

    def compare(self) -> None:
        """All parameters are equal; collective."""
        with torch.no_grad(), self.sharded.optimizer.full_parameters():
            assert_same_parameters(*self.nets)

    def check_live(self, when: str, *, idle: bool = False, awaited: int = 0) -> None:
        """See :func:`~.checks.assert_live`."""
        if self._is_sharded and not self._contexts:
            assert_live(self.sharded.optimizer, self.setting, idle=idle, when=when, awaited=awaited)
