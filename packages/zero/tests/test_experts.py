"""Experts: parameters of which neighbours of the data axis have different parts (``mesh.ep``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import (
    CommOptions,
    Mesh,
    OneBit,
    Sharding,
    Split,
    gather_for,
    reduce_scatter_to,
    set_sharding,
)
from shardweave.comm.testing import run_ranks
from shardweave.zero import MixedPrecision, ZeroOptimizer
from shardweave.zero.checkpoint import full_state_dict, load_checkpoint, save_checkpoint

WIDTH, EXPERTS, TOKENS = 5, 4, 6
ADAM: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


class Experts(nn.Module):
    """Each token goes through one expert, a matrix; those of a rank of ``ep`` see the tokens of all of them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.ep = mesh.ep
        own = EXPERTS // self.ep.size
        self.first = self.ep.rank * own
        whole = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)
        self.weight = nn.Parameter(whole[self.first : self.first + own].clone())
        split = Split(self.ep, 0, self.first)
        set_sharding(
            self.weight, Sharding("experts.weight", tuple(whole.shape), (split,), reduced=mesh.expert_data)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = gather_for(x, self.ep, 0)
        chosen = (tokens.detach()[:, 0] * 1e6).long() % EXPERTS
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.weight.unbind()):
            mine = (chosen == self.first + number)[:, None]
            out = out + mine * (tokens @ expert)
        return reduce_scatter_to(out, self.ep, 0)


class Net(nn.Module):
    """Dense layers around the experts, and a scale that is used by both."""

    def __init__(self, mesh: Mesh, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.before = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.experts = Experts(mesh)
        self.after = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        out: Tensor = self.after(x + torch.tanh(self.experts(x)))
        return out


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(net: Net, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean()
    return loss


def alone(ranks: int, *, steps: int, micros: int, clip: float) -> tuple[list[Tensor], list[float]]:
    """What one process makes of all ranks' batches: parameters and norms."""
    net = Net(Mesh.single())
    optimizer = torch.optim.AdamW(net.parameters(), **ADAM)
    norms = []
    for step in range(steps):
        for rank in range(ranks):
            for micro in range(micros):
                (loss_of(net, batch(step, rank, micro)) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()], norms


def optimizer_of(net: Net, mesh: Mesh, stage: int, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        net.named_parameters(), torch.optim.AdamW, data=mesh.data, model=mesh.model, shard=mesh.shard, stage=stage,
        module=net, bucket_mb=1e-4, **ADAM, **options,
    )  # fmt: skip


def train(net: Net, optimizer: ZeroOptimizer, mesh: Mesh, steps: range, micros: int) -> list[float]:
    norms = []
    for step in steps:
        for micro in range(micros - 1):
            with optimizer.accumulate():
                loss_of(net, batch(step, mesh.data.rank, micro)).backward()
        loss_of(net, batch(step, mesh.data.rank, micros - 1)).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    return norms


def assert_is(net: Net, optimizer: ZeroOptimizer, right: list[Tensor]) -> None:
    own = slice(net.experts.first, net.experts.first + EXPERTS // net.experts.ep.size)
    with torch.no_grad(), optimizer.full_parameters():
        for (name, mine), expected in zip(net.named_parameters(), right, strict=True):
            expected = expected[own] if name.startswith("experts") else expected
            assert float((mine - expected).abs().max()) <= 1e-12 * float(expected.abs().max()), name


def check(mesh: Mesh, stages: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    for micros in (1, 2):
        right, norms = alone(mesh.data.size, steps=3, micros=micros, clip=0.3)
        for stage in stages:
            # Each rank begins with other values: the first one's count, of each expert that of its first owner.
            net = Net(mesh, seed=0 if mesh.data.rank < mesh.ep.size else mesh.data.rank)
            optimizer = optimizer_of(net, mesh, stage, clip=0.3)
            assert train(net, optimizer, mesh, range(3), micros) == pytest.approx(norms, rel=1e-12)
            assert_is(net, optimizer, right)
    mesh.close()


@pytest.mark.ranks(4)
def test_experts_equal_one_process_at_every_stage() -> None:
    check(Mesh(dp=4, ep=2))
    check(Mesh(dp=4, ep=4))  # each expert on one rank: nothing of it is reduced or sharded


@pytest.mark.ranks(8)
def test_experts_with_replicas() -> None:
    check(Mesh(dp=8, ep=2, replicas=2), (1, 2, 3))
    check(Mesh(dp=8, ep=4, replicas=2), (1, 3))


@pytest.mark.ranks(4)
def test_bytes_of_experts() -> None:
    """Between copies only: an expert's gradient does not travel to ranks that have others."""
    mesh = Mesh(dp=4, ep=2)
    net = Net(mesh)
    optimizer = optimizer_of(net, mesh, 1)
    mesh.ledger.reset()
    train(net, optimizer, mesh, range(1), 1)
    elements = net.experts.weight.numel()
    for kind in ("reduce_scatter", "all_gather"):
        assert mesh.ledger.total("expert_data", kind).elements == elements
        assert mesh.ledger.total("expert_data", kind).sent == elements * 8 // 2


def written(folder: str, stage: int, ep: int) -> None:
    mesh = Mesh(dp=4, ep=ep)
    net = Net(mesh)
    optimizer = optimizer_of(net, mesh, stage)
    train(net, optimizer, mesh, range(2), 1)
    save_checkpoint(Path(folder), optimizer, world=mesh.world)
    whole = full_state_dict(optimizer, world=mesh.world)
    if mesh.world.is_first:
        net = Net(Mesh.single())
        plain = torch.optim.AdamW(net.parameters(), **ADAM)
        for step in range(2):
            for rank in range(4):
                (loss_of(net, batch(step, rank)) / 4).backward()
            plain.step()
            plain.zero_grad()
        mine, right = whole["state"]["experts.weight"]["exp_avg"], plain.state[net.experts.weight]["exp_avg"]
        assert float((mine - right).abs().max()) <= 1e-12 * float(right.abs().max())


def continued(folder: str, stage: int, dp: int, ep: int) -> None:
    mesh = Mesh(dp=dp, ep=ep)
    net = Net(mesh, seed=7)
    optimizer = optimizer_of(net, mesh, stage)
    load_checkpoint(Path(folder), optimizer, world=mesh.world)
    right, _ = alone(4, steps=2, micros=1, clip=1e9)
    assert_is(net, optimizer, right)


def test_checkpoints_of_experts_are_loaded_by_any_layout(tmp_path: Path) -> None:
    for stage, ep, to_stage, dp, to_ep in ((0, 2, 3, 4, 4), (1, 4, 1, 2, 1), (3, 2, 2, 2, 2)):
        folder = str(tmp_path / f"{stage}-{ep}")
        run_ranks(written, 4, folder, stage, ep)
        run_ranks(continued, dp, folder, to_stage, dp, to_ep)


@pytest.mark.ranks(4)
def test_sixteen_bit_gradients_and_a_sum() -> None:
    """A mean over two of four ranks is halved, whatever it is kept in; a sum is not."""
    mesh = Mesh(dp=4, ep=2)
    for stage in (0, 1, 2, 3):
        for reduction, times in (("mean", 1), ("sum", 4)):
            weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
            record = Sharding("w", (4, 3), (Split(mesh.ep, 0, 2 * mesh.ep.rank),), reduced=mesh.expert_data)
            set_sharding(weight, record)
            optimizer = ZeroOptimizer(
                [weight], torch.optim.SGD, lr=1.0, data=mesh.data, stage=stage, reduction=reduction,
                precision=MixedPrecision(gradients=torch.bfloat16), module=nn.ParameterList([weight]),
            )  # fmt: skip
            (weight * (1 + 2 * mesh.expert_data.rank + 2 * mesh.ep.rank)).sum().backward()
            optimizer.step()
            moved = times * (1.0 + mesh.ep.rank)
            assert weight.tolist() == [[-moved] * 3] * 2


@pytest.mark.ranks(4)
def test_records_that_cannot_be_are_refused() -> None:
    mesh = Mesh(dp=4, ep=2, options=CommOptions(background=True))

    def build(**record: Any) -> None:
        weight = nn.Parameter(torch.zeros(2, 3))
        set_sharding(weight, Sharding("w", (4, 3), **record))
        ZeroOptimizer([weight], torch.optim.SGD, lr=1.0, data=mesh.data)

    split = Split(mesh.ep, 0, 2 * mesh.ep.rank)
    with pytest.raises(
        ValueError, match=r"parameter w is split over .*reduced=mesh.expert_data in its record"
    ):
        build(splits=(split,))
    with pytest.raises(ValueError, match=r"parameter w is reduced over .*which leaves out ranks"):
        build(splits=(), reduced=mesh.expert_data)
    with pytest.raises(ValueError, match="parameter w is split over"):
        build(splits=(split,), reduced=mesh.ep)
    with pytest.raises(ValueError, match=r"compression with experts\.weight"):
        optimizer_of(Net(mesh), mesh, 1, compression=OneBit())
