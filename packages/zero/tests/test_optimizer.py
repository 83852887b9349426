"""Equal to one process: the definition of correctness, for stages, ranks, optimizers and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.zero import ZeroOptimizer

STAGES = (0, 1, 2)


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Odd sizes on purpose; a parameter used twice, a scalar, and one without elements."""
    torch.manual_seed(seed)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 7)
            self.shared = nn.Linear(7, 7)
            self.scale = nn.Parameter(torch.randn(()))
            self.empty = nn.Parameter(torch.zeros(0, 8))
            self.last = nn.Linear(7, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            x = torch.tanh(self.shared(self.shared(x))) * self.scale
            return self.last(x) + self.empty.sum()

    return Net().to(dtype)


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) ** 2).mean()


def reference(
    make: Callable[[nn.Module], torch.optim.Optimizer], ranks: int, *, steps: int = 3, micros: int = 1, clip: float | None = None
) -> tuple[list[Tensor], list[float]]:
    """One process, gradients averaged over what the ranks see."""
    net = model()
    optimizer = make(net)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for micro in range(micros):
                (loss_of(net, batch(step, rank, micro)) / ranks).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9)
        norms.append(float(norm))
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()], norms


def assert_equal(found: nn.Module, expected: list[Tensor]) -> None:
    for (name, parameter), right in zip(found.named_parameters(), expected, strict=True):
        assert parameter.shape == right.shape, name
        if right.numel():
            error = (parameter.detach() - right).abs().max() / right.abs().max()
            assert error < 1e-12, f"{name}: {float(error)}"


def equals_one_process(kind: Any, arguments: dict[str, Any], stage: int, ranks: int, **options: Any) -> None:
    mesh = Mesh(dp=ranks)
    net = model(seed=mesh.data.rank)  # rank 0's values are the ones that count
    optimizer = ZeroOptimizer(net.parameters(), kind, data=mesh.data, stage=stage, **options, **arguments)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, batch(step, mesh.data.rank)).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    right, right_norms = reference(lambda m: kind(m.parameters(), **arguments), ranks, clip=options.get("clip"))
    assert_equal(net, right)
    assert norms == pytest.approx(right_norms, rel=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_adamw_two_ranks(stage: int) -> None:
    equals_one_process(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, stage, 2, bucket_mb=0.0003)
