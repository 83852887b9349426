"""Documents that are kept apart, and samples of blends: in every layout what one process does."""

from __future__ import annotations

import json
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardweave.comm import Mesh, broadcast_value
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data.blend import BlendOrder
from shardweave.launcher.data.dataset import IGNORED, Corpus, Dataset, Source
from shardweave.launcher.data.tokens import ArrayTokens
from shardweave.launcher.reading import load_config
from shardweave.launcher.sample_log import samples_of_step
from shardweave.launcher.trainer import Trainer
from shardweave.tensor_parallel import document_targets

SETTINGS = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=4",
    "model.sequence=16",
    "batch.global=8",
    "batch.micro=1",
    "optimizer.warmup=1",
    "optimizer.lr=1e-2",
    "run.steps=20",
    "precision=fp64",
    "zero.stage=1",
]


def _config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def _texts(seed: int, documents: int) -> ArrayTokens:
    """Documents of 2 to 12 tokens: several in a sample."""
    random = np.random.default_rng(seed)
    return ArrayTokens.of(
        f"texts {seed}",
        [random.integers(1, 256, random.integers(2, 13)).astype(np.uint8) for _ in range(documents)],
    )


def _apart(documents: int = 120) -> Dataset:
    return Dataset.cut(_texts(3, documents), 16, 0.2, separate_documents=True)


def test_documents_of_a_sample_have_numbers_and_no_target_leads_over_a_border() -> None:
    tokens = ArrayTokens.of("two", [np.array([1, 2, 3, 4, 5]), np.array([6, 7, 8]), np.array([9])])
    batch = Dataset.cut(tokens, 8, separate_documents=True).micro_batch(np.array([0]))
    assert batch.inputs.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.targets.tolist() == [[2, 3, 4, 5, IGNORED, 7, 8, IGNORED]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    whole = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])
    numbers = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2]])
    assert document_targets(whole, numbers).tolist() == batch.targets.tolist()
    together = Dataset.cut(tokens, 8).micro_batch(np.array([0]))
    assert together.documents is None
    assert together.targets.tolist() == whole.tolist()


@pytest.mark.parametrize("position", ["alibi", "rotary", "learned"])
def test_b106_packed_documents_are_those_alone(position: str) -> None:
    """Documents of 5 and 3 tokens in one sample: loss, tokens and gradients' norm are those of the two alone."""
    documents = [np.array([11, 12, 13, 14, 15]), np.array([21, 22, 23]), np.array([31])]
    data = Dataset.cut(ArrayTokens.of("two", documents), 8, separate_documents=True)
    sizes = ("model.sequence=8", "batch.global=1", f"model.position={position}", "optimizer.clip=null")
    trainer = Trainer(_config(*sizes), Mesh.single(), dataset=data)
    (model,) = trainer.parts.modules
    model.eval()
    alone = [torch.from_numpy(document)[None] for document in documents[:2]]
    total = torch.stack([model.loss(model(one[:, :-1]), one[:, 1:]) for one in alone]).sum() / 6
    norm = torch.stack([
        gradient.norm() for gradient in torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        if gradient is not None
    ]).norm()  # fmt: skip
    model.train()
    result = trainer.train_step()
    assert result.tokens == 6
    assert result.loss == pytest.approx(total.item(), rel=1e-10)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-10)


Numbers = list[tuple[float, float, int]]


def _trained(config: Config, mesh: Mesh, data: Dataset) -> tuple[Numbers, float]:
    trainer = Trainer(config, mesh, dataset=data)
    results = [trainer.train_step() for _ in range(3)]
    found = trainer.evaluate()
    assert found is not None
    return [(result.loss, result.grad_norm, result.tokens) for result in results], found.loss


@pytest.mark.ranks(8, timeout=170)
def test_documents_are_apart_in_every_layout() -> None:
    data = _apart()
    right, validation = _trained(_config(), Mesh.single(), data)
    together, _ = _trained(_config(), Mesh.single(), Dataset(data.sources))
    assert right[0][2] < together[0][2] == 8 * 16
    assert abs(right[0][0] - together[0][0]) > 1e-4
    layouts: list[tuple[dict[str, Any], list[str]]] = [
        ({"tp": 2, "pp": 2, "cp": 2}, ["recompute=full"]),
        ({"dp": 2, "pp": 2, "cp": 2}, ["zero.stage=3", "recompute=selective"]),
        ({"dp": 2, "tp": 2, "cp": 2}, ["parallel.context_form=all-to-all", "batch.chunked_loss=true"]),
        ({"dp": 4, "tp": 2}, ["zero.stage=3", "batch.micro=2"]),
    ]
    for sizes, more in layouts:
        names = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context"}
        layout = [f"parallel.{names[axis]}={size}" for axis, size in sizes.items()]
        mesh = Mesh(**sizes)
        found, evaluated = _trained(_config(*layout, *more), mesh, data)
        for ours, theirs in zip(found, right, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        assert evaluated == pytest.approx(validation, rel=1e-9)
        mesh.close()


def _blend() -> Dataset:
    """Three sources, one of a few samples: its epochs are short."""
    weights = {0: "0.6", 1: "0.39", 2: "0.01"}
    sources = []
    for number, weight in weights.items():
        tokens = _texts(number, 12 if number == 1 else 90)
        corpus = Corpus(tokens.name, lambda tokens=tokens: tokens, 16)  # type: ignore[misc]
        sources.append(Source(corpus, Fraction(weight), number))
    return Dataset(tuple(sources))


@pytest.mark.ranks(8, timeout=170)
def test_samples_are_the_same_in_every_layout_and_after_every_stop() -> None:
    """Stretches on 8, 4, 2 and 1 data ranks with other numbers of workers, each from the checkpoint before."""
    order = BlendOrder(_blend().sources, 1234)
    stretches: tuple[tuple[dict[str, Any], list[str], int], ...] = (
        ({"dp": 8}, ["parallel.data=8", "data.workers=0"], 2),
        ({"dp": 4, "tp": 2}, ["parallel.data=4", "parallel.tensor=2", "data.workers=3"], 3),
        ({"dp": 2, "pp": 2, "tp": 2}, ["parallel.data=2", "parallel.tensor=2", "parallel.pipeline=2"], 1),
        ({"tp": 4, "pp": 2}, ["parallel.tensor=4", "parallel.pipeline=2", "data.workers=2"], 2),
        ({"dp": 2, "tp": 4}, ["parallel.data=2", "parallel.tensor=4", "batch.micro=2"], 2),
    )
    seen: list[int] = []
    with tempfile.TemporaryDirectory() as own:
        root: Path | None = None
        for sizes, settings, steps in stretches:
            mesh = Mesh(**sizes)
            root = root or Path(broadcast_value(own, mesh.world))
            trainer = Trainer(_config(*settings), mesh, dataset=_blend())
            resume(trainer, root, _quiet)
            for _ in range(steps):
                trainer.train_step()
                told = samples_of_step(trainer)
                first = broadcast_value(told, mesh.world)
                assert told == first
                seen += told
            save(trainer, root, keep=1)
            trainer.close()
            mesh.close()
    assert seen == order.visits(0, len(seen)).samples.tolist()
    assert len(seen) == 80
    longer = BlendOrder(_blend().sources, 1234).visits(0, 400).samples.tolist()
    assert longer[:80] == seen


def _quiet(text: str) -> None:
    raise AssertionError(text)


def test_a_blend_of_a_configuration_opens_what_it_uses(tmp_path: Path) -> None:
    """A source whose weight is too small for a sample of the run need not even be there; the others are read."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name}{number} " * 9}) for number in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    listed = [
        f"{{source: {tmp_path}/a.jsonl, weight: 0.7}}",
        f"{{source: {tmp_path}/b.jsonl, weight: 0.3}}",
        "{source: nowhere.txt, weight: 1e-6}",
        "{source: nothing.txt, weight: 0}",
    ]
    config = _config(f"data.source=[{', '.join(listed)}]")
    data = open_dataset(config, 16)
    assert [source.corpus.is_open for source in data.sources] == [True, True, False, False]
    assert len(data.held_out) == 2
    trainer = Trainer(config, Mesh.single(), dataset=data)
    trainer.train_step()
    assert trainer.position is not None
    given = [one.taken for one in trainer.position.sources]
    assert given in ([6, 2, 0, 0], [5, 3, 0, 0])  # 5.6 and 2.4
    trainer.close()
