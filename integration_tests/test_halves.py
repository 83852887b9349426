"""Schedules with a backward in two halves under ZeRO, with layers that know of neither: plain ``nn.Linear``."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh, WeightGradients
from shardweave.pipeline import Pipeline, schedule
from shardweave.zero import ZeroOptimizer

WIDTH = 4

STEPS = 2
"""The second on what the first has left: moments, and at stage 3 the order of use."""


class Block(nn.Module):
    """A product that can be put off, and a norm that cannot."""

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(40 + index)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, 7, dtype=torch.float64)
        self.down = nn.Linear(7, WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch(micro_batches: int, step: int, replica: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    rows = [
        torch.randn(2, 1 + i % 3, WIDTH, generator=generator, dtype=torch.float64)
        for i in range(micro_batches)
    ]
    return [row[0] for row in rows], [row[1] for row in rows]


def trained(num_stages: int, micro_batches: int, steps: int) -> nn.Sequential:
    """One process, with the batches of both replicas."""
    whole = nn.Sequential(*(Block(index) for index in range(num_stages)))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(2):
            for x, target in zip(*batch(micro_batches, step, replica), strict=True):
                (squares(whole(x), target) / 2).backward()
        optimizer.step()
    return whole


@pytest.mark.ranks(4)
def test_halves_under_every_stage_of_zero() -> None:
    mesh = Mesh(pp=2, dp=2)
    for name, count in (("zb-h1", 3), ("zb-v", 4), ("dualpipe-v", 5)):
        plan = schedule(name, ranks=2, micro_batches=count)
        halves = sum(action.kind == "I" for action in plan.actions[mesh.pp.rank])
        right = trained(plan.num_stages, count, STEPS)
        for stage, recompute in ((0, False), (1, False), (2, False), (3, False), (3, True)):
            held = plan.stages_of(mesh.pp.rank)
            modules = nn.ModuleList(Block(index) for index in held)
            pipeline = Pipeline(list(modules), mesh.pp, plan, loss=squares, recompute=recompute)
            optimizer = ZeroOptimizer(
                modules.named_parameters(), torch.optim.AdamW, data=mesh.data, model=mesh.model, stage=stage,
                module=list(modules) if stage == 3 else None, lr=0.05,
            )  # fmt: skip
            put_off = WeightGradients.put
            with patch.object(WeightGradients, "put", autospec=True, side_effect=put_off) as put:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    pipeline.step(*batch(count, step, mesh.data.rank))
                    optimizer.step()
            assert put.call_count == STEPS * 2 * halves  # products of a block
            with optimizer.full_parameters():
                for index, module in zip(held, modules, strict=True):
                    for mine, other in zip(module.parameters(), right[index].parameters(), strict=True):
                        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-11, atol=1e-11)
