"""B059: fewer elements than ranks, none at all, sizes that nothing divides, one rank; trained, saved and loaded."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from packages.zero.tests.nets import STAGES, make_optimizer
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, name_parameters
from shardweave.comm.testing import run_ranks
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import load_checkpoint, save_checkpoint

SHAPES = ((1,), (2,), (3,), (5,), (3, 3), (0, 8), ())
UNITS_MB = (25, 1e-6)
"""All parameters in one unit; each in a unit of its own, some with more ranks than elements."""
TRAINED, FURTHER = 3, 2
"""Steps before and after saving."""


class Sizes(nn.Module):
    """Parameters that are multiplied by what comes in, so that this is their gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, shape in enumerate(SHAPES):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(f"p{number}", nn.Parameter(values))

    def forward(self, factors: list[Tensor]) -> Tensor:
        products = [(p * factor).sum() for p, factor in zip(self.parameters(), factors, strict=True)]
        return torch.stack(products).sum()


def factors(step: int, axis: Axis) -> list[Tensor]:
    """Of this rank: the same mean over any number of ranks, and other values on each."""
    generator = torch.Generator().manual_seed(100 + step)
    apart = axis.rank - (axis.size - 1) / 2
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        + apart * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in SHAPES
    ]


Truth = list[tuple[Tensor, Tensor, Tensor]]
"""Each parameter with its two moments."""


@functools.cache  # asked at every stage and for units of every size
def one_process(steps: int) -> tuple[Truth, list[float]]:
    """What plain torch makes of the means, with the norms of all steps."""
    net = Sizes()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        net(factors(step, Axis.single())).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        optimizer.step()
    truth = []
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        truth.append((parameter.detach(), state["exp_avg"], state["exp_avg_sq"]))
    return truth, norms


def build(axis: Axis, stage: int, bucket_mb: float) -> tuple[Sizes, ZeroOptimizer]:
    net = Sizes()
    name_parameters(net)
    optimizer = make_optimizer(
        net, torch.optim.AdamW, stage=stage, data=axis, lr=0.1, clip=1.0, bucket_mb=bucket_mb
    )
    return net, optimizer


def train(net: Sizes, optimizer: ZeroOptimizer, axis: Axis, steps: range) -> None:
    _, norms = one_process(steps.stop)
    for step in steps:
        net(factors(step, axis)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(optimizer.grad_norm) == pytest.approx(norms[step], rel=1e-12)


def check(net: Sizes, optimizer: ZeroOptimizer, steps: int) -> None:
    """Parameters in their shapes, and the moments of the pieces that this rank holds."""
    truth, _ = one_process(steps)
    for parameter, (right, _, _), shape in zip(net.parameters(), truth, SHAPES, strict=True):
        assert parameter.shape == torch.Size(shape)
        torch.testing.assert_close(parameter.detach(), right, rtol=1e-12, atol=1e-14)
    for piece in optimizer.pieces():
        _, *moments = truth[int(piece.name.removeprefix("p"))]
        for kind, right in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            mine = right.flatten()[piece.begin : piece.begin + piece.values.numel()]
            torch.testing.assert_close(piece.state[kind], mine, rtol=1e-12, atol=1e-14)


def save(folder: str, ranks: int) -> None:
    """Trains at every stage in large and in small units, and saves one of the two."""
    mesh = Mesh(dp=ranks)
    for stage in STAGES:
        for number, bucket_mb in enumerate(UNITS_MB):
            net, optimizer = build(mesh.data, stage, bucket_mb)
            train(net, optimizer, mesh.data, range(TRAINED))
            check(net, optimizer, TRAINED)
            if number == stage % 2:
                save_checkpoint(f"{folder}/{ranks}-{stage}", optimizer, world=mesh.world)


def load(folder: str, ranks: int) -> int:
    """Goes on from every checkpoint at the next stage, in units of either size."""
    mesh = Mesh(dp=ranks)
    paths = sorted(Path(folder).iterdir())
    for number, path in enumerate(paths):
        stage = STAGES[(number + 1) % len(STAGES)]
        net, optimizer = build(mesh.data, stage, UNITS_MB[(number // 2) % 2])
        load_checkpoint(path, optimizer, world=mesh.world)
        check(net, optimizer, TRAINED)
        train(net, optimizer, mesh.data, range(TRAINED, TRAINED + FURTHER))
        check(net, optimizer, TRAINED + FURTHER)
    return len(paths)


@pytest.mark.timeout(240)
def test_b059_any_sizes_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Saved by four ranks and by one, loaded on four, three and one, and without any process group."""
    for ranks in (4, 1):
        run_ranks(save, ranks, str(tmp_path), ranks, timeout=100)
    written = 2 * len(STAGES)
    for ranks in (4, 3, 1):
        assert run_ranks(load, ranks, str(tmp_path), ranks, timeout=100) == [written] * ranks
    assert load(str(tmp_path), 1) == written
