"""Model states that a rank really has, at every stage of ZeRO, beside what the overview says."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
import torch

from shardweave.comm import Mesh
from shardweave.launcher.assembly import DTYPES
from shardweave.launcher.reading import load_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.trainer import Trainer
from shardweave.models import RankLayout, memory
from shardweave.zero import ZeroOptimizer

SMALL = ("model.hidden=64", "model.layers=3", "model.position=learned", "model.sequence=32", "batch.global=4")


def alive() -> int:
    """Bytes of all tensors that this process has."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.ranks(2)
def test_states_are_those_of_a_real_optimizer() -> None:
    """Between the backward pass of a step and its update, in float32 and with masters of bfloat16."""
    for precision in ("fp32", "bf16"):
        for stage in range(4):
            config = load_config(
                None, [*SMALL, "parallel.data=2", f"zero.stage={stage}", f"precision={precision}"]
            )
            mesh = Mesh(dp=2)
            before = alive()
            trainer = Trainer(config, mesh)
            optimizer = trainer.parts.optimizer
            seen: list[int] = []

            def update(optimizer: ZeroOptimizer = optimizer, seen: list[int] = seen) -> None:
                optimizer.finish_reduction()  # what is on its way is there, too
                seen.append(alive())
                ZeroOptimizer.step(optimizer)

            with patch.object(optimizer, "step", update):
                for _ in range(2):
                    trainer.train_step()
            use = memory(
                transformer_config(config),
                layout=RankLayout(data=2, zero_stage=stage),
                dtype=DTYPES[precision],
            )
            states = use.parameters + use.gradients + use.optimizer
            assert seen[1] - before == pytest.approx(states, rel=0.01), (precision, stage)
            del trainer, optimizer, update
            mesh.close()
