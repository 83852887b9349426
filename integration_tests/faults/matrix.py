"""Twelve layouts on 1 to 8 ranks: a checkpoint of each, loaded in each, is bit for bit what was saved.

``python -m integration_tests.faults.matrix`` tries all 144 pairs, of parameters, moments and step counts. What each
rank holds is put together by another way than the checkpoint's: the smallest and the largest value that any rank has
for an element, which have to be the same number, so that copies are compared, too. The ranks of one number are started
once to save and once to load, whatever their layouts.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from integration_tests.layouts import FAMILIES, Layout, small_run
from torch import Tensor

from shardweave.comm import full_index, gather_values, sharding_of
from shardweave.comm.testing import run_ranks
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.layout import layout_of
from shardweave.launcher.trainer import Trainer

__all__ = ["CASES", "FEW", "Case", "differences"]

GLOBAL_BATCH = 24
MODEL: Mapping[str, Any] = {
    **FAMILIES["mixtral-like"],
    "model__layers": 4,
    "model__hidden": 16,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__vocab": 257,
    "model__sequence": 8,
    "model__ffn": 12,
    "batch__global": GLOBAL_BATCH,
}
"""Experts, with biases that balance them; fewer KV heads than ranks; a vocabulary that nothing divides."""


@dataclass(frozen=True)
class Case:
    """A layout, and settings of how it communicates."""

    layout: Layout
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def micro(self) -> int:
        """A micro-batch: four of them for a pipeline, one without."""
        return GLOBAL_BATCH // (self.layout.data * (4 if self.layout.pipeline > 1 else 1))

    def __str__(self) -> str:
        return " ".join([str(self.layout), *(f"{name}={value}" for name, value in self.settings.items())])


CASES: tuple[Case, ...] = (
    Case(Layout()),
    Case(Layout(data=2, stage=1), {"comm__compression": "onebit", "comm__warmup": 1}),
    Case(Layout(context=2, stage=3)),
    Case(Layout(data=3, stage=3)),
    Case(Layout(tensor=4, sequence=True, stage=1)),  # two KV heads on four ranks
    Case(Layout(data=4, expert=4, stage=3)),
    Case(Layout(data=4, stage=2), {"zero__replicas": 2}),
    Case(Layout(data=2, pipeline=2, schedule="zb-v", stage=3)),
    Case(Layout(data=3, tensor=2, sequence=True, stage=2)),
    Case(Layout(data=2, expert=2, tensor=2, pipeline=2, schedule="interleaved", chunks=2, stage=1)),
    Case(Layout(data=2, context=2, tensor=2, sequence=True, stage=3)),
    Case(Layout(data=4, pipeline=2, schedule="zb-v", stage=0)),
)
FEW: tuple[int, ...] = (0, 1, 2)
"""Places in `CASES` of what the suite tries: one process, residuals, and stage 3 over context ranks."""


def trainer_of(case: Case) -> Trainer:
    """A new one over all ranks of the world; dropout, data and weights are those of every other layout."""
    warnings.simplefilter("ignore")
    tokens = np.random.default_rng(7).integers(1, 256, 8 * 80 + 1).astype(np.uint8)
    config = small_run(case.layout, **{**MODEL, "batch__micro": case.micro, **case.settings})
    mesh = mesh_of(config, layout_of(config))
    return Trainer(config, mesh, dataset=Dataset.of_tokens(tokens, 8))


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters, moments and step counts in their full shape on every rank, float64.

    AssertionError: two ranks have different values for one element, or nobody has any.
    """
    optimizer = trainer.parts.optimizer
    own = {
        sharding_of(piece.parameter).name: tuple(sharding_of(piece.parameter).shape)
        for piece in optimizer.pieces()
    }
    shapes = {
        name: shape for of_rank in gather_values(own, trainer.mesh.world) for name, shape in of_rank.items()
    }
    kinds = ("value", "exp_avg", "exp_avg_sq", "step")
    keys = [(f"{kind}/{name}", shapes[name]) for name in sorted(shapes) for kind in kinds]
    sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape in keys]
    smallest = torch.full((sum(sizes),), torch.inf, dtype=torch.float64)
    largest = torch.full_like(smallest, -torch.inf)
    for bound in (smallest, largest):
        full = {key: part.view(shape) for (key, shape), part in zip(keys, bound.split(sizes), strict=True)}
        for piece in optimizer.pieces():
            where = full_index(piece.parameter)
            name = sharding_of(piece.parameter).name
            for kind in kinds:
                held = piece.values if kind == "value" else piece.state[kind].expand(piece.values.shape)
                key = f"{kind}/{name}"
                local = full[key][where].reshape(-1).clone()
                local[piece.begin : piece.begin + held.numel()] = held.double().reshape(-1)
                full[key][where] = local.view(full[key][where].shape)
    if dist.is_initialized():
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    apart = [
        key
        for (key, _), low, high in zip(keys, smallest.split(sizes), largest.split(sizes), strict=True)
        if not torch.equal(low, high)
    ]
    assert not apart, f"ranks differ, or nobody has all of {apart[:5]}"
    found = {
        key: part.view(shape).clone() for (key, shape), part in zip(keys, smallest.split(sizes), strict=True)
    }
    return found | {f"buffer/{name}": one.clone() for name, one in trainer.parts.buffers().items()}


def saved(places: Sequence[int], root: str) -> dict[int, dict[str, Tensor]]:
    """Two steps and a checkpoint in each of these cases; what it is of, by its place, on the first rank."""
    found = {}
    for place in places:
        trainer = trainer_of(CASES[place])
        for _ in range(2):
            trainer.train_step()
        save(trainer, Path(root) / str(place), keep=0)
        found[place] = gathered(trainer)
        trainer.mesh.close()
    return _by_first(found)


def loaded(
    places: Sequence[int], sources: Sequence[int], root: str
) -> dict[int, dict[int, dict[str, Tensor]]]:
    """What each source's checkpoint becomes in each of these cases, on the first rank; with a step after it."""
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    for place in places:
        trainer = trainer_of(CASES[place])
        found[place] = {}
        for source in sources:  # a later one has to replace all of the one before
            assert resume(trainer, Path(root) / str(source), _told) is not None
            assert (trainer.step, trainer.samples) == (2, 2 * GLOBAL_BATCH)
            found[place][source] = gathered(trainer)
            trainer.train_step()  # what is loaded next finds other values, and residuals of this layout
        trainer.mesh.close()
    return _by_first(found)


def _by_first(found: dict[int, Any]) -> dict[int, Any]:
    return found if not dist.is_initialized() or dist.get_rank() == 0 else {}


def _told(text: str) -> None:
    """That gradients are sent in another way is said; nothing else is expected to be."""
    if not text.startswith("warning: changed since step-00000002: `comm."):
        raise AssertionError(text)


def differences(root: Path, places: Sequence[int]) -> list[str]:
    """What is not bit-equal in all pairs of these cases, in words."""
    by_ranks: dict[int, list[int]] = {}
    for place in places:
        by_ranks.setdefault(CASES[place].layout.ranks, []).append(place)
    right: dict[int, dict[str, Tensor]] = {}
    for ranks, group in by_ranks.items():
        right |= run_ranks(saved, ranks, group, str(root), timeout=300)[0]
    wrong = []
    for ranks, group in by_ranks.items():
        for place, by_source in run_ranks(loaded, ranks, group, list(places), str(root), timeout=500)[
            0
        ].items():
            assert by_source.keys() == set(places)
            for source, found in by_source.items():
                names = sorted(found.keys() | right[source].keys())
                wrong += [
                    f"{name}: {CASES[source]} -> {CASES[place]}"
                    for name in names
                    if name.partition("/")[0] != "buffer"
                    and not _equal(found.get(name), right[source].get(name))
                ]
                # A stage holds the buffers of its own layers; the first rank's are compared where both have them.
                wrong += [
                    f"{name}: {CASES[source]} -> {CASES[place]}"
                    for name in sorted(found.keys() & right[source].keys())
                    if name.startswith("buffer/") and not torch.equal(found[name], right[source][name])
                ]
    return wrong


def _equal(ours: Tensor | None, right: Tensor | None) -> bool:
    return ours is not None and right is not None and torch.equal(ours, right)


def main() -> int:
    """All pairs; exit status 1 when one is not bit-equal."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardweave-matrix-") as root:
        wrong = differences(Path(root), range(len(CASES)))
    pairs = len(CASES) ** 2
    print("\n".join(wrong) or f"{pairs} pairs of layouts, bit for bit, in {time.monotonic() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
