"""Several groups of tied parameters at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, sharding_of
from shardweave.pipeline import Pipeline, schedule, tie_all

WIDTH = 5


class Part(nn.Module):
    """A stage that uses one or both of the shared parameters."""

    def __init__(self, seed: int, *names: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in names:  # so parameters() has the order of the names
            value = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))
        self.own = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for _, parameter in sorted(self.named_parameters()):
            x = torch.tanh(x * parameter) + x
        return x


def parts() -> list[Part]:
    """Every stage of a model of three; A is on 0 and 2, B on all, in another order on each."""
    return [Part(1, "A", "B"), Part(2, "B"), Part(3, "B", "A")]


def step(model: list[Part]) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(9)
    rows = [torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [row[0] for row in rows], [row[1] for row in rows]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def reference() -> list[Part]:
    """One process, where what is tied is one object; after a backward."""
    model = parts()
    model[2].A = model[0].A
    model[1].B = model[2].B = model[0].B
    for x, target in zip(*step(model), strict=True):
        squares(model[2](model[1](model[0](x))), target).backward()
    return model


@pytest.mark.ranks(3)
def test_b014_groups_declared_in_another_order_on_each_rank_do_not_wait_for_each_other() -> None:
    mesh = Mesh(pp=3)
    rank = mesh.pp.rank
    mine = parts()[rank]

    def held(name: str, stages: list[int]) -> dict[int, nn.Parameter | None]:
        return {stage: getattr(mine, name) if stage == rank else None for stage in stages}

    groups = {"A": held("A", [0, 2]), "B": held("B", [2, 1, 0])}
    tie_all(groups if rank == 0 else dict(reversed(groups.items())), mesh.pp)
    pipeline = Pipeline([mine], mesh.pp, schedule("1f1b", ranks=3, micro_batches=4), loss=squares)
    pipeline.step(*step(parts()))
    parameters = list(mine.parameters())
    comm.sum_partial_gradients(parameters)
    whole = reference()
    for name, parameter in mine.named_parameters():
        theirs = dict(whole[rank].named_parameters())[name]
        assert torch.equal(parameter, theirs)  # the values of the first that has it
        assert sharding_of(parameter).name == (name if name in ("A", "B") else "")
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    norm = comm.gradient_norm(parameters, mesh.model)
    once = {id(p): p for part in whole for p in part.parameters()}
    expected = torch.stack([p.grad.norm() for p in once.values() if p.grad is not None]).norm()
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)


class Forced(nn.Module):
    """A stage whose gradients are what the test says."""

    def __init__(self, embedding: nn.Parameter | None, gradient: list[float]) -> None:
        super().__init__()
        self.embedding = embedding
        self.other = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.gradient = torch.tensor(gradient, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sum() + 0 * self.other.sum()
        return x if self.embedding is None else x + (self.embedding * self.gradient).sum()


@pytest.mark.ranks(2)
def test_b003_a_tied_embedding_is_counted_once_with_several_stages_per_rank() -> None:
    """On a V both stages are on one rank, on a loop on two. The parts of the gradient make (20, 20)."""
    mesh = Mesh(pp=2)
    for name in ("zb-v", "interleaved"):
        plan = schedule(name, ranks=2, chunks=2, micro_batches=2)
        mine = plan.stages_of(mesh.pp.rank)
        weight = nn.Parameter(torch.full((2,), float(mesh.pp.rank), dtype=torch.float64))
        held = {stage: weight if stage in mine else None for stage in (0, 3)}
        tie_all({"embedding": held}, mesh.pp, rank_of_stage=plan.rank_of_stage)
        gradients = {0: [2.5, 9.5], 3: [7.5, 0.5]}  # of each of the two micro-batches
        stages = [Forced(held.get(stage), gradients.get(stage, [])) for stage in mine]
        Pipeline(stages, mesh.pp, plan).step([torch.zeros(1, dtype=torch.float64)] * 2)
        parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
        comm.sum_partial_gradients(parameters)
        norm = comm.gradient_norm(parameters, mesh.model)
        assert float(norm) == pytest.approx(800**0.5, rel=1e-15)
        if any(copy is not None for copy in held.values()):
            assert weight.tolist() == [0.0, 0.0]
            assert weight.grad is not None
            assert weight.grad.tolist() == [20.0, 20.0]
            assert (sharding_of(weight).tied is None) == (name == "zb-v")


def declared_wrongly() -> None:
    mesh = Mesh(pp=3)
    rank = mesh.pp.rank
    weight = nn.Parameter(torch.ones(2, 3))
    wrong = nn.Parameter(torch.ones(3, 2))
    pair = {0: weight if rank == 0 else None, 2: weight if rank == 2 else None}
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: tie_all({"e": pair} if rank else {"e": pair, "f": pair}, mesh.pp),
            "rank 1 .* ties {'e': \\[0, 2\\]} and rank 0 {'e': \\[0, 2\\], 'f': \\[0, 2\\]}",
        ),
        (lambda: tie_all({"e": {0: pair[0], 2: None}}, mesh.pp), "rank 2 .* has none of 'e' for stage 2"),
        (
            lambda: tie_all({"e": {0: weight, 2: pair[2]}}, mesh.pp),
            "is given a copy of 'e' for stage 0, which is on rank 0",
        ),
        (
            lambda: tie_all({"e": pair | ({2: wrong} if rank == 2 else {})}, mesh.pp),
            r"copies of 'e' differ .* \['\[2, 3\] torch.float32'\] on rank 0 .* \['\[3, 2\] torch.float32'\] on rank 2",
        ),
        (lambda: tie_all({"e": {0: pair[0], 3: None}}, mesh.pp), "name stages from 0 to 2"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
        assert sharding_of(weight).tied is None  # nothing was changed
    tie_all({}, mesh.pp)


@pytest.mark.ranks(3)
def test_what_does_not_agree_is_refused_on_all_ranks() -> None:
    declared_wrongly()


def test_two_objects_on_one_rank_are_refused() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="for two stages and gives two parameters; let both stages use one object"
    ):
        tie_all({"e": {0: first.weight, 1: last.weight}}, Axis.single("pp"), rank_of_stage=(0, 0))
    last.weight = first.weight
    tie_all({"e": {0: first.weight, 1: last.weight}}, Axis.single("pp"), rank_of_stage=(0, 0))
    assert sharding_of(first.weight).tied is None
