"""A module, its data, and what one process makes of them: shared by the tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.zero import ZeroOptimizer

__all__ = [
    "STAGES", "Net", "assert_equal", "batch", "impatient", "loss_of", "make_optimizer", "model", "one_process",
]  # fmt: skip

STAGES = (0, 1, 2, 3)
"""Every stage there is."""


class Net(nn.Module):
    """Odd sizes on purpose; a layer used twice, a scalar, and a parameter without elements."""

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
        out: Tensor = self.last(x) + self.empty.sum()
        return out


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    """The net with values drawn from ``seed``."""
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    """What one rank sees in one micro-batch: [4, 5], different everywhere."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    """A mean over the batch, as usual."""
    loss: Tensor = (net(x) ** 2).mean()
    return loss


def make_optimizer(
    module: nn.Module, kind: type[torch.optim.Optimizer], *, stage: int, data: Axis, **options: Any
) -> ZeroOptimizer:
    """The optimizer of a module, at any stage; ``params`` among the options: groups in place of all parameters."""
    params = options.pop("params", None)
    if stage > 2:
        options["module"] = module
    return ZeroOptimizer(
        module.named_parameters() if params is None else params, kind, stage=stage, data=data, **options
    )


def one_process(
    make: Callable[[Net], torch.optim.Optimizer],
    ranks: int,
    *,
    steps: int = 3,
    micros: int = 1,
    clip: float | None = None,
    after_step: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
) -> tuple[list[Tensor], list[float]]:
    """Final parameters and gradient norms of plain torch on the gradients of all ranks, averaged."""
    net = model()
    optimizer = make(net)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for micro in range(micros):
                (loss_of(net, batch(step, rank, micro)) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9)))
        optimizer.step()
        after_step(optimizer)
    return [parameter.detach().clone() for parameter in net.parameters()], norms


def impatient() -> None:
    """A rank says what it waits for after a moment, not after seconds; for bodies of ranks that part."""
    patch("shardweave.zero.same_order._LONG", 0.4).start()


def assert_equal(found: nn.Module, expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    """Each parameter equal relative to its largest entry, in its original shape."""
    for (name, parameter), right in zip(found.named_parameters(), expected, strict=True):
        assert parameter.shape == right.shape, name
        if right.numel():
            difference = (parameter.detach() - right.detach()).abs().max()
            error = float(difference / right.detach().abs().max())
            assert error < tolerance, f"{name} is off by {error}"
