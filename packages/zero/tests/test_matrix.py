"""Stages, data ranks, accumulation and optimizers in every combination, on one module that has all that is awkward.

One process that adds up the gradients of all ranks is the truth, to 1e-12 of each tensor's largest entry, after six
steps: every kind of step twice (`takes_branch`, and `late`). One group of ranks walks all combinations of its size;
they share the references, which do not know stages.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, make_optimizer
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, broadcast
from shardweave.comm.testing import run_ranks

STEPS = 6
TOLERANCE = 1e-12
SMALL = 0.0004
"""MiB in a unit: several units, and some parameters larger than one."""

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


class Awkward(nn.Module):
    """Odd sizes; one parameter in two places and one layer used twice; frozen, unused and seldom used ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.randn(()))
        self.unused = nn.Linear(3, 3)
        self.branch = nn.Linear(7, 7, bias=False)
        self.late = nn.Parameter(torch.randn(7))
        self.adapter = nn.Linear(7, 5)
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.adapter.weight.requires_grad_(False)  # beside a trained bias

    def forward(self, tokens: Tensor, *, branch: float | None, late: bool) -> Tensor:
        """``branch``: how much of it is added; with ``None`` it does not run."""
        x = torch.tanh(self.frozen(self.embedding(tokens)))
        x = torch.tanh(self.twice(self.twice(x))) * self.scale
        if branch is not None:
            x = x + branch * self.branch(x)
        if late:
            x = x * self.late
        logits: Tensor = self.head(self.norm(self.adapter(x) + self.empty.sum()))
        return logits

    def groups(self) -> list[dict[str, Any]]:
        """Decay for matrices, none for the rest, and one group with a rate of its own; frozen ones in between."""
        own = {"branch.weight", "scale"}
        named = dict(self.named_parameters())
        return [
            {
                "params": [(name, p) for name, p in named.items() if p.dim() > 1 and name not in own],
                "weight_decay": 0.1,
            },
            {"params": [(name, p) for name, p in named.items() if p.dim() < 2 and name not in own]},
            {"params": [(name, named[name]) for name in sorted(own)], "lr": 0.02, "weight_decay": 0.01},
        ]


def awkward(seed: int) -> Awkward:
    """With values from the seed, in float64."""
    torch.manual_seed(seed)
    return Awkward().double()


def takes_branch(step: int, rank: int, micro: int) -> bool:
    """Not in every third step, and then in every other micro-batch."""
    return step % 3 != 2 and (step + rank + micro) % 2 == 0


def loss_of(
    net: Awkward, step: int, rank: int, micro: int, *, together: tuple[int, int] | None = None
) -> Tensor:
    """What one rank makes of one micro-batch; which parameters it uses depends on step, rank and micro-batch.

    ``together``: numbers of ranks and micro-batches, for stage 3, where a module runs on all ranks or on none: with
    a weight of 0 where a rank would leave it out and another one does not.
    """
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    tokens, targets = torch.randint(11, (2, 3, 4), generator=generator)
    branch = 1.0 if takes_branch(step, rank, micro) else None
    if branch is None and together is not None:
        others = itertools.product(*map(range, together))
        branch = 0.0 if any(takes_branch(step, *other) for other in others) else None
    logits = net(tokens, branch=branch, late=step >= 3 and (rank + micro) % 3 == 0)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    stage: int
    micros: int
    optimizer: str


def cases() -> list[Case]:
    """All cells of one number of ranks."""
    return [
        Case(stage, micros, optimizer)
        for stage, micros, optimizer in itertools.product(STAGES, (1, 4), OPTIMIZERS)
    ]


def reference(ranks: int, micros: int, optimizer: str) -> Awkward:
    """Plain torch on the mean over the ranks of the sums over the micro-batches."""
    net = awkward(0)
    kind, arguments = OPTIMIZERS[optimizer]
    plain = kind(net.groups(), **arguments)
    for step in range(STEPS):
        plain.zero_grad()
        for rank, micro in itertools.product(range(ranks), range(micros)):
            (loss_of(net, step, rank, micro) / ranks).backward()
        plain.step()
    return net


def references(axis: Axis, chosen: Sequence[Case]) -> dict[tuple[int, str], dict[str, Tensor]]:
    """The truths of these cases, each computed by one rank for all."""
    wanted = sorted({(case.micros, case.optimizer) for case in chosen})
    found = {}
    for number, (micros, optimizer) in enumerate(wanted):
        mine = number % axis.size == axis.rank
        net = reference(axis.size, micros, optimizer) if mine else awkward(0)
        found[micros, optimizer] = {name: p.detach() for name, p in net.named_parameters()}
    for number, key in enumerate(wanted):
        for values in found[key].values():
            broadcast(values, axis, number % axis.size)
    return found


def trained(axis: Axis, case: Case) -> Awkward:
    """Some steps of a case; each rank starts with other values: rank 0's are to count."""
    net = awkward(axis.rank)
    for parameter, right in zip(net.parameters(), awkward(0).parameters(), strict=True):
        if not parameter.requires_grad:
            parameter.data.copy_(right.data)
    kind, arguments = OPTIMIZERS[case.optimizer]
    optimizer = make_optimizer(
        net, kind, stage=case.stage, data=axis, params=net.groups(), bucket_mb=SMALL, **arguments
    )
    together = (axis.size, case.micros) if case.stage == 3 else None
    for step in range(STEPS):
        for micro in range(case.micros):
            with optimizer.accumulate() if micro < case.micros - 1 else nullcontext():
                loss_of(net, step, axis.rank, micro, together=together).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def parting(chosen: Sequence[Case], ranks: int) -> list[str]:
    """What is not equal, in words, in all these cases; a rank's part of the test."""
    axis = Mesh(dp=ranks).data
    right = references(axis, chosen)
    start = {name: p.detach() for name, p in awkward(0).named_parameters()}
    wrong = []
    for case in chosen:
        for name, parameter in trained(axis, case).named_parameters():
            values, expected = parameter.detach(), right[case.micros, case.optimizer][name]
            if not parameter.requires_grad or name.startswith("unused"):
                equal = torch.equal(values, start[name])
            else:
                scale = float(expected.abs().max()) if expected.numel() else 1.0
                equal = values.numel() == 0 or float((values - expected).abs().max()) <= TOLERANCE * scale
            if not equal or values.shape != expected.shape:
                wrong.append(f"dp {ranks}, {case}: {name}")
    return wrong


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.timeout(300)
def test_every_combination_equals_one_process(ranks: int) -> None:
    for of_rank in run_ranks(parting, ranks, cases(), ranks, timeout=280):
        assert of_rank == []


@pytest.mark.parametrize("ranks", (3, 4))
@pytest.mark.timeout(300)
def test_a_quarter_of_the_combinations_on_three_ranks_and_another_on_four(ranks: int) -> None:
    """All of them in `nox -s lattice` (``python -m packages.zero.tests.test_matrix``)."""
    kinds = list(OPTIMIZERS)
    chosen = [
        case
        for case in cases()
        if (kinds.index(case.optimizer) + ranks) % 2 and (case.stage + (case.micros > 1) + ranks) % 2
    ]
    assert 4 * len(chosen) == len(cases())
    assert {case.stage for case in chosen} == set(STAGES)
    for of_rank in run_ranks(parting, ranks, chosen, ranks, timeout=280):
        assert of_rank == []


@pytest.mark.timeout(300)
def test_one_combination_of_each_stage_and_optimizer_on_eight_ranks() -> None:
    """All of them in `nox -s lattice`."""
    kinds = list(OPTIMIZERS)
    chosen = [c for c in cases() if kinds.index(c.optimizer) == c.stage and (c.micros > 1) == c.stage % 2]
    assert {case.stage for case in chosen} == set(STAGES)
    assert {case.optimizer for case in chosen} == set(OPTIMIZERS)
    for of_rank in run_ranks(parting, 8, chosen, 8, timeout=280):
        assert of_rank == []


def test_what_the_module_is_awkward_about() -> None:
    """The comparison would pass on a module that never used what it is about."""
    net = reference(3, 1, "Adam")
    start = awkward(0)
    changed = {
        name
        for (name, a), b in zip(net.named_parameters(), start.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    names = {name for name, _ in net.named_parameters()}
    assert names - changed == {
        "frozen.weight", "frozen.bias", "adapter.weight", "unused.weight", "unused.bias", "empty",
    }  # fmt: skip
    assert net.head.weight is net.embedding.weight


def main() -> int:
    """The whole matrix on three, four and eight ranks; exit status 1 when a combination parts."""
    parted = False
    for ranks in (3, 4, 8):
        found = run_ranks(parting, ranks, cases(), ranks, timeout=1800)
        wrong = dict.fromkeys(line for of_rank in found for line in of_rank)
        print("\n".join(wrong) or f"{len(cases())} combinations of {ranks} ranks equal one process")
        parted = parted or bool(wrong)
    return parted


if __name__ == "__main__":
    sys.exit(main())
