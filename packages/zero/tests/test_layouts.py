"""With tensor and pipeline parallelism written out by hand: nothing but sharding records tells the optimizer."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from packages.zero.tests.nets import STAGES
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Mesh, Sharding, Split, set_sharding
from shardweave.zero import ZeroOptimizer

IN, HIDDEN, FFN, ROWS = 5, 6, 8, 3


def full_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (IN, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {f"{layer}.up": (HIDDEN, FFN), f"{layer}.down": (FFN, HIDDEN), f"{layer}.bias": (HIDDEN,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def data(step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(ROWS, IN, generator=generator, dtype=torch.float64)


def serial(ranks: int, micros: int, steps: int = 2) -> tuple[dict[str, Tensor], list[float]]:
    weights = {name: nn.Parameter(value) for name, value in full_weights().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.01)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank, micro in itertools.product(range(ranks), range(micros)):
            h = data(step, rank, micro) @ weights["embedding"] * weights["norm"]
            for layer in range(2):
                inner = torch.tanh(h @ weights[f"{layer}.up"])
                h = h + inner @ weights[f"{layer}.down"] + weights[f"{layer}.bias"]
            ((h @ weights["embedding"].T).square().mean() / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), 0.5)))
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}, norms


class Stage:
    """What one rank holds: layer ``pp.rank`` (both when there is one stage), split over ``tp``."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        tp, pp = mesh.tp, mesh.pp
        self.layers = [pp.rank] if pp.size > 1 else [0, 1]
        exclusive = (pp,) if pp.size > 1 else ()
        size = FFN // tp.size
        self.weights: dict[str, nn.Parameter] = {}
        for name, value in full_weights().items():
            record = Sharding(name, tuple(value.shape), exclusive=exclusive)
            if name == "embedding" and pp.size > 1:
                record = Sharding(name, tuple(value.shape), exclusive=(pp,), tied=pp, partial=(pp,))
            elif (name == "norm" and not pp.is_first) or (
                name[0].isdigit() and int(name[0]) not in self.layers
            ):
                continue
            elif name.endswith(("up", "down")):
                dim = 1 if name.endswith("up") else 0
                value = value.narrow(dim, size * tp.rank, size)
                splits = (Split(tp, dim, size * tp.rank),)
                record = Sharding(name, record.shape, splits=splits, exclusive=exclusive)
            self.weights[name] = nn.Parameter(value.clone())
            set_sharding(self.weights[name], record)

    def forward(self, h: Tensor) -> Tensor:
        """One micro-batch through this stage's layers; the loss on the last stage."""
        tp, w = self.mesh.tp, self.weights
        if self.mesh.pp.is_first:
            h = h @ w["embedding"] * w["norm"]
        for layer in self.layers:
            inner = torch.tanh(comm.copy_to(h, tp) @ w[f"{layer}.up"])
            h = h + comm.reduce_from(inner @ w[f"{layer}.down"], tp) + w[f"{layer}.bias"]
        return (h @ w["embedding"].T).square().mean() if self.mesh.pp.is_last else h

    def forward_backward(self, x: Tensor) -> None:
        """The simplest pipeline there is: one micro-batch after the other."""
        pp = self.mesh.pp
        if not pp.is_first:
            x = comm.receive(torch.empty(ROWS, HIDDEN, dtype=torch.float64), pp, pp.rank - 1)
            x.requires_grad_(True)
        out = self.forward(x)
        if pp.is_last:
            out.backward()
        else:
            comm.send(out.detach(), pp, pp.rank + 1)
            out.backward(comm.receive(torch.empty_like(out), pp, pp.rank + 1))
        if not pp.is_first:
            assert x.grad is not None
            comm.send(x.grad, pp, pp.rank - 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_b119_every_stage_with_pipeline_tensor_and_accumulation(stage: int) -> None:
    """Also stages 2 and 3 with a pipeline, which others refuse: equal to one process."""
    for pp, tp, micros in itertools.product((1, 2), (1, 2), (1, 2)):
        mesh = Mesh(pp=pp, tp=tp, dp=4 // (pp * tp))
        own = Stage(mesh)
        optimizer = ZeroOptimizer(
            own.weights.values(),
            torch.optim.AdamW,
            module=nn.ParameterList(own.weights.values()),
            data=mesh.data,
            model=mesh.model,
            stage=stage,
            clip=0.5,
            lr=0.01,
            bucket_mb=0.0003,
        )
        norms = []
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(micros):
                with optimizer.accumulate() if micro < micros - 1 else nullcontext():
                    own.forward_backward(data(step, mesh.data.rank, micro))
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        right, right_norms = serial(mesh.data.size, micros)
        assert norms == pytest.approx(right_norms, rel=1e-10)
        for name, weight in own.weights.items():
            index = comm.full_index(weight)
            torch.testing.assert_close(weight.detach(), right[name][index], rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2)
def test_unnamed_tied_parameters_pair_up_by_their_order_whatever_else_a_stage_holds() -> None:
    """``group0.9`` sorts behind ``group0.10``: a name made up from a place must not order anything."""
    mesh = Mesh(pp=2)
    a, b = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([5.0]))
    shared = mesh.pp.subset([0, 1])
    assert shared is not None
    for parameter in (a, b):
        record = Sharding("", (1,), partial=(shared,), exclusive=(mesh.pp,), tied=shared)
        set_sharding(parameter, record)
    others = [nn.Parameter(torch.ones(2)) for _ in range(9)] if mesh.pp.is_first else []
    optimizer = ZeroOptimizer(
        [*others, a, b], torch.optim.SGD, data=mesh.data, model=mesh.model, stage=1, lr=1.0
    )
    (a.sum() + 10 * b.sum() + sum((p.sum() for p in others), torch.zeros(()))).backward()
    optimizer.step()
    assert (a.item(), b.item()) == (-1.0, -15.0)


@pytest.mark.ranks(2)
def test_a_parameter_that_data_ranks_have_different_parts_of_is_refused() -> None:
    """Starting equal and reducing would take parts for copies."""
    mesh = Mesh(dp=2)
    weight = nn.Parameter(torch.full((3,), float(mesh.data.rank)))
    set_sharding(weight, Sharding("experts", (6,), (Split(mesh.data, 0, 3 * mesh.data.rank),)))
    with pytest.raises(ValueError, match=r"parameter experts is split over .*, which is inside data="):
        ZeroOptimizer([weight], torch.optim.SGD, data=mesh.data, lr=1.0)
    assert weight.tolist() == [float(mesh.data.rank)] * 3
