"""A run saved on any layout goes on from there on any other: the same parameters, moments and next step.

On the same layout it goes on bit for bit. Each group of ranks does everything for its layout. In float64 each loads
one of the others; `nox -s lattice` tries all of the hundred pairs, and every fifth in float32, where only the
tolerance is another (``python -m integration_tests.test_checkpoints``).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from integration_tests.layouts import Layout, small_run
from torch import Tensor

from shardweave.comm import Mesh, all_reduce, barrier, full_index, gather_values, sharding_of
from shardweave.comm.testing import run_ranks
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.trainer import Trainer

LAYOUTS: tuple[Layout, ...] = (
    Layout(),
    Layout(data=3, tensor=2, sequence=True, stage=2),
    Layout(data=2, pipeline=2, stage=1),
    Layout(tensor=4, sequence=True, stage=1),
    Layout(pipeline=4, schedule="gpipe"),
    Layout(data=4, stage=0),
    Layout(data=4, stage=1),
    Layout(data=4, stage=2),
    Layout(data=4, stage=3),
    # Uneven stages: three blocks, an embedding and a head over two.
    Layout(data=2, tensor=2, pipeline=2, sequence=True, stage=3),
)

# 12 samples a step, for three and for four replicas; fewer KV heads than ranks; a vocabulary that nothing divides.
MODEL = {
    "model__layers": 3,
    "model__hidden": 16,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__vocab": 257,
    "model__sequence": 8,
    "batch__global": 12,
}


def trainer_of(layout: Layout, mesh: Mesh, **settings: Any) -> Trainer:
    tokens = np.random.default_rng(7).integers(1, 256, 8 * 60 + 1).astype(np.uint8)
    dataset = Dataset.of_tokens(tokens, 8)
    micro = 12 // (layout.data * (3 if layout.pipeline > 1 else 1))  # another one for each layout
    config = small_run(layout, **{**MODEL, "batch__micro": micro, **settings})
    return Trainer(config, mesh, dataset=dataset)


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and moments in their full shape, on every rank; another way than the checkpoint's."""
    mesh, optimizer = trainer.mesh, trainer.parts.optimizer
    shapes = {piece.name: sharding_of(piece.parameter).shape for piece in optimizer.pieces() if piece.counts}
    names = sorted({name for of_rank in _names(shapes, mesh) for name in of_rank.items()})
    kinds = ("", "exp_avg/", "exp_avg_sq/", "step/")
    sizes = [torch.Size(shape).numel() for name, shape in names for _ in kinds]
    everything = torch.zeros(sum(sizes), dtype=torch.float64)  # one sum over the ranks for all of them
    keys = [(f"{kind}{name}", shape) for name, shape in names for kind in kinds]
    full = {key: part.view(shape) for (key, shape), part in zip(keys, everything.split(sizes), strict=True)}
    for piece in optimizer.pieces():
        if piece.counts and (optimizer.stage > 0 or mesh.data.is_first):
            elements = {
                "": piece.values,
                "exp_avg/": piece.state["exp_avg"],
                "exp_avg_sq/": piece.state["exp_avg_sq"],
            }
            elements["step/"] = piece.state["step"].expand(piece.values.shape)
            for kind, flat in elements.items():
                local = torch.zeros(piece.parameter.numel(), dtype=torch.float64)
                local[piece.begin : piece.begin + flat.numel()] = flat.double()
                where = full_index(piece.parameter)
                full[kind + piece.name][where] += local.view(piece.parameter.shape)
    all_reduce(everything, mesh.world)
    return {
        key: values.clone() for key, values in full.items()
    }  # a view would be sent with all it is a view of


def _names(shapes: dict[str, tuple[int, ...]], mesh: Mesh) -> Iterator[dict[str, tuple[int, ...]]]:
    for of_rank in gather_values(shapes, mesh.world):
        yield {name: tuple(shape) for name, shape in of_rank.items()}


def mesh_of(layout: Layout) -> Mesh:
    return Mesh(dp=layout.data, tp=layout.tensor, pp=layout.pipeline)


def first_only(value: Any) -> Any:
    return value if not dist.is_initialized() or dist.get_rank() == 0 else None


def source(layout: Layout, root: str, precision: str) -> Any:
    """Trains two steps and saves; what was saved, and the loss of the step after."""
    trainer = trainer_of(layout, mesh_of(layout), precision=precision)
    for _ in range(2):
        trainer.train_step()
    save(trainer, Path(root), keep=0)
    full = gathered(trainer)
    return first_only((full, trainer.train_step().loss))


def target(layout: Layout, roots: list[str], precision: str) -> Any:
    """What each checkpoint becomes here, and the loss of the step after."""
    mesh = mesh_of(layout)
    found = []
    for root in roots:
        trainer = trainer_of(layout, mesh, precision=precision)
        assert resume(trainer, Path(root), _no_news) is not None
        assert (trainer.step, trainer.samples) == (2, 24)
        full = gathered(trainer)
        found.append((full, trainer.train_step().loss))
    return first_only(found)


def _no_news(text: str) -> None:
    raise AssertionError(text)


def differences(root: Path, precision: str, tolerance: float, *, every: int) -> list[str]:
    """What parts, in words; each layout loads every ``every``-th of the others."""
    roots = [str(root / str(number)) for number in range(len(LAYOUTS))]
    sources = [
        run_ranks(source, layout.ranks, layout, of_one, precision, timeout=120)[0]
        for layout, of_one in zip(LAYOUTS, roots, strict=True)
    ]
    wrong = []
    for number, layout in enumerate(LAYOUTS):
        chosen = range((number + 3) % every, len(LAYOUTS), every)
        asked = [roots[place] for place in chosen]
        pairs = run_ranks(target, layout.ranks, layout, asked, precision, timeout=240)[0]
        for place, (found, loss) in zip(chosen, pairs, strict=True):
            pair, (right, right_loss) = f"{LAYOUTS[place]} -> {layout}", sources[place]
            different = [
                name for name in right.keys() | found if not _equal(found.get(name), right.get(name))
            ]
            wrong += [f"{name}: {pair}" for name in sorted(different)]
            if not abs(loss - right_loss) <= tolerance * right_loss:
                wrong.append(f"loss {loss} for {right_loss}: {pair}")
    return wrong


def _equal(ours: Tensor | None, right: Tensor | None) -> bool:
    return ours is not None and right is not None and torch.equal(ours, right)


@pytest.mark.timeout(600)
def test_b091_layouts_continue_one_another(tmp_path: Path) -> None:
    """Each is loaded by one other, mostly of another kind; `nox -s lattice` tries every pair."""
    assert differences(tmp_path, "fp64", 1e-12, every=len(LAYOUTS)) == []


# -- the same layout, bit for bit ----------------------------------------------------------------------------

SAME: tuple[tuple[Layout, dict[str, Any]], ...] = tuple(
    (layout, {"precision": precision})
    for layout, precision in (
        (Layout(data=2, tensor=2, sequence=True, stage=0), "bf16"),
        (Layout(data=2, tensor=2, stage=1), "fp32"),
        (Layout(data=2, pipeline=2, stage=1), "bf16"),
        (Layout(data=2, pipeline=2, schedule="gpipe", stage=2), "fp32"),
        (Layout(data=2, tensor=2, sequence=True, stage=3), "fp32"),
        (Layout(data=2, pipeline=2, stage=3), "bf16"),
    )
)


def stopped_and_resumed(root: str) -> list[tuple[str, list[float], list[float], list[str]]]:
    """Two steps and two more, with a checkpoint in between; the second time from it, with nothing left over."""
    found = []
    for number, (layout, settings) in enumerate(SAME):
        mesh = mesh_of(layout)
        whole = trainer_of(layout, mesh, **settings)
        for _ in range(2):
            whole.train_step()
        save(whole, Path(root) / str(number), keep=1)
        barrier(mesh.world)
        again = trainer_of(layout, mesh, **settings)
        resume(again, Path(root) / str(number), _no_news)
        losses = [[trainer.train_step().loss for _ in range(2)] for trainer in (whole, again)]
        right, ours = gathered(whole), gathered(again)
        different = [name for name, values in right.items() if not torch.equal(ours[name], values)]
        found.append((f"{layout} {settings}", losses[0], losses[1], different))
        mesh.close()
    return found


@pytest.mark.timeout(300)
def test_b090_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for what, right, losses, different in run_ranks(stopped_and_resumed, 4, str(tmp_path), timeout=240)[0]:
        assert losses == right, what
        assert different == [], what
    shutil.rmtree(tmp_path)


def main() -> int:
    """All pairs; exit status 1 when one parts."""
    wrong = []
    for precision, tolerance, every in (("fp64", 1e-12, 1), ("fp32", 1e-6, 5)):
        with tempfile.TemporaryDirectory(prefix="shardweave-pairs-") as root:
            wrong += differences(Path(root), precision, tolerance, every=every)
    print("\n".join(wrong) or f"{len(LAYOUTS)} layouts go on from each of them, bit for bit")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
