"""Published weights straight into and out of runs of any layout, and models that are created in shards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.comm.tests.live import LiveBytes
from torch import Tensor

from shardweave.comm import Mesh, sharding_of
from shardweave.launcher.assembly import assemble
from shardweave.launcher.data.dataset import MicroBatch
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Trainer
from shardweave.models import Transformer, TransformerConfig, from_huggingface, to_huggingface

SHAPE = TransformerConfig(
    layers=3, hidden=16, heads=4, kv_heads=2, ffn=22, vocab=257, sequence=8, position="rotary", norm="rmsnorm",
    activation="swiglu",
)  # fmt: skip
"""Llama's, with a tied head, which two stages share."""

SETTINGS = [
    "model.layers=3", "model.hidden=16", "model.heads=4", "model.kv_heads=2", "model.ffn=22", "model.vocab=257",
    "model.sequence=8", "model.position=rotary", "model.norm=rmsnorm", "model.activation=swiglu",
    "model.embedding_norm=false", "batch.global=8", "batch.micro=1", "run.steps=3", "optimizer.warmup=0",
    "run.device=cpu", "precision=fp64",
]  # fmt: skip


class Numbers:
    """The same samples in every layout, drawn from their numbers."""

    def __init__(self, micro_batches: int, rank: int, ranks: int) -> None:
        self._micro_batches, self._rank, self._ranks = micro_batches, rank, ranks

    def at(self, visit: int) -> list[MicroBatch]:
        mine = range(visit + self._rank, visit + self._micro_batches * self._ranks, self._ranks)
        return [self._batch(sample) for sample in mine]

    def _batch(self, sample: int) -> MicroBatch:
        text = torch.randint(257, (1, 9), generator=torch.Generator().manual_seed(sample))
        return MicroBatch(torch.tensor([sample]), text[:, :-1], text[:, 1:])


def write_published(directory: Path) -> dict[str, Tensor]:
    """Files with every parameter random, and these parameters."""
    model = Transformer(SHAPE, dtype=torch.float64, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    to_huggingface(model, directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(directory: Path, out: Path, **axes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A run on a mesh that starts from the files: its losses, and what it exported before the first step."""
    stage = axes.pop("stage", 1)
    mesh = Mesh(**axes)
    config = load_config(None, [*SETTINGS, f"model.weights={directory}", f"zero.stage={stage}"])
    plan = 8 // mesh.dp.size
    trainer = Trainer(config, mesh, batches=Numbers(plan, mesh.dp.rank, mesh.dp.size))
    before = mesh.ledger.total().sent
    to_huggingface(trainer.parts.modules, out, world=mesh.world, shard_size="4KB")
    assert (
        stage == 3 or mesh.ledger.total().sent - before < 1000
    )  # no parameter, unless it is gathered to be trained
    losses = [trainer.train_step().loss for _ in range(3)]
    mesh.close()
    return losses, dict(from_huggingface(out).named_parameters())


@pytest.mark.ranks(4)
def test_every_layout_starts_from_the_same_published_weights(tmp_path: Path) -> None:
    """Also at stage 3, where modules have no memory before they are sharded, and out again; then they train alike."""
    mesh = Mesh(dp=4)
    if mesh.world.is_first:
        write_published(tmp_path / "published")
    torch.distributed.barrier()
    mesh.close()
    expected = dict(from_huggingface(tmp_path / "published").named_parameters())
    found = [
        trained(tmp_path / "published", tmp_path / f"out-{number}", **axes)
        for number, axes in enumerate(
            [{"dp": 4}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2, "stage": 3}, {"dp": 2, "pp": 2, "stage": 3}]
        )
    ]
    for losses, parameters in found:
        assert losses == pytest.approx(found[0][0], rel=1e-12)
        for name, parameter in expected.items():
            assert torch.equal(parameters[name], parameter), name


@pytest.mark.ranks(2)
def test_a_model_is_created_in_shards() -> None:
    """Half of 529 MiB stays on each of two ranks, and the most there was beside is a block and a half."""
    wide = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 32768, "sequence": 16}
    settings = [f"model.{key}={value}" for key, value in wide.items()]
    config = load_config(
        None, [*settings, "batch.global=2", "batch.micro=1", "run.device=cpu", "zero.stage=3"]
    )
    mesh = Mesh(dp=2)
    with LiveBytes(float("inf")) as memory:
        parts = assemble(config, mesh)
        held = memory.now()
    whole = sum(4 * math.prod(sharding_of(parameter).shape) for parameter in parts.parameters())
    block = sum(
        4 * math.prod(sharding_of(parameter).shape) for parameter in parts.modules[0].layers["0"].parameters()
    )
    assert whole // 2 <= held <= whole // 2 + 4096
    assert memory.peak < whole // 2 + 1.5 * block + (16 << 20) < whole
    mesh.close()
