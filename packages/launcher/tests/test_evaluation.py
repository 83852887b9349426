"""Means over a validation set: exact, on however many ranks, and in bits for each byte of its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packages.launcher.tests.small_tokenizers import WORDS, byte_level, saved
from torch import Tensor

from shardweave.comm import Mesh
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import IGNORED, Corpus, Dataset, MicroBatch, Source
from shardweave.launcher.data.tokenizer import ByteTokenizer
from shardweave.launcher.data.tokens import ArrayTokens
from shardweave.launcher.data.validation import ValidationSource, validation_sources
from shardweave.launcher.evaluation import Evaluation, evaluate
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.words import tokenizer_of

SETTINGS = [
    "precision=fp64",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.sequence=8",
    "batch.global=8",
    "batch.micro=1",
    "optimizer.lr=1e-2",
    "optimizer.warmup=1",
]
BYTES = ByteTokenizer().token_bytes


def _config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def _dataset(validation: int) -> Dataset:
    tokens = np.random.default_rng(5).integers(1, 256, 8 * 44 + 1).astype(np.uint8)
    return Dataset.of_tokens(tokens, 8, validation / 44)


def _source(name: str, samples: int, first: int = 0, valid: int = 8) -> ValidationSource:
    """Samples `first`, `first` + 1, ..., of whose 8 targets `valid` count, each the sample's number."""

    def read(numbers: NDArray[np.int64]) -> MicroBatch:
        targets = torch.from_numpy(numbers + first).unsqueeze(1).repeat(1, 8)
        targets[:, valid:] = IGNORED
        return MicroBatch(torch.from_numpy(numbers), targets.clamp(min=0), targets)

    return ValidationSource(name, samples, read)


class _NumberedLoss:
    """Stands in for the model's loss: that of a token is its target."""

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return targets[targets != IGNORED].sum().double() + 0.0 * output.sum()


def _numbered(trainer: Trainer) -> Trainer:
    for stage in trainer.parts.pipeline.stages.values():
        stage._loss = _NumberedLoss()
    return trainer


def _evaluated(
    trainer: Trainer, *sources: ValidationSource, most: int | None = None, sizes: NDArray[np.int32] = BYTES
) -> Evaluation:
    found = evaluate(trainer.parts, trainer.mesh, sources, most, sizes)
    assert found is not None
    return found


@pytest.mark.ranks(4, timeout=120)
def test_b109_five_samples_with_losses_1_to_5_are_3_on_however_many_ranks() -> None:
    for sizes in (None, {"dp": 4}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}):
        for micro in (1, 2):
            mesh = Mesh.single() if sizes is None else Mesh.of(sizes)
            trainer = _numbered(Trainer(_config(f"batch.micro={micro}"), mesh, dataset=_dataset(0)))
            found = _evaluated(trainer, _source("five", 5, 1))
            assert (found.loss, found.tokens) == (3.0, 40)
            assert found.bits_per_byte == pytest.approx(3.0 / math.log(2), rel=1e-15)
            assert found.losses == {}
            mesh.close()


@pytest.mark.ranks(4, timeout=120)
def test_several_sources_have_a_loss_each_and_count_by_their_tokens() -> None:
    """40 tokens of 3.0, 6 of 20.0, and one whole source of which only three replicas have a sample."""
    for sizes, stage in (({"dp": 4}, 3), ({"pp": 2, "dp": 2}, 1)):
        mesh = Mesh.of(sizes)
        trainer = _numbered(Trainer(_config(f"zero.stage={stage}"), mesh, dataset=_dataset(0)))
        sources = _source("five", 5, 1), _source("three", 3, 19, valid=2), _source("none", 0)
        found = _evaluated(trainer, *sources)
        assert found.loss == pytest.approx((40 * 3.0 + 6 * 20.0) / 46, rel=1e-15)
        assert found.tokens == 46
        assert found.losses == {"five": 3.0, "three": 20.0}
        mesh.close()


@pytest.mark.ranks(4, timeout=120)
def test_every_layout_finds_what_one_process_does_over_all_samples_and_in_rounds() -> None:
    """13 samples in micro-batches of 2, a round of a single micro-batch at a time, against all at once."""
    dataset = _dataset(13)
    config = _config("run.eval_samples=all", "batch.micro=2", "batch.global=16")
    alone = Trainer(config, Mesh.single(), dataset=dataset)
    expected = alone.evaluate()
    assert expected is not None
    assert expected.tokens == 13 * 8
    for sizes, more in (
        ({"dp": 4}, ["zero.stage=3"]),
        ({"dp": 2, "pp": 2}, []),
        ({"cp": 2, "dp": 2}, ["zero.stage=3"]),
        ({"tp": 2, "pp": 2}, ["batch.chunked_loss=true"]),
    ):
        mesh = Mesh.of(sizes)
        trainer = Trainer(
            _config("run.eval_samples=all", "batch.micro=2", "batch.global=16", *more), mesh, dataset=dataset
        )
        with mock.patch("shardweave.launcher.evaluation._round_size", return_value=1):
            found = trainer.evaluate()
        assert found is not None
        assert found.tokens == expected.tokens
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-12)
        mesh.close()


def _several(separate: bool) -> Dataset:
    """Two sources, of which one has half as much for validation, in short documents; the second is there twice."""

    def corpus(name: str, seed: int, documents: int) -> Corpus:
        draw = np.random.default_rng(seed)
        pieces = [np.append(draw.integers(1, 256, 10), 0).astype(np.uint8) for _ in range(documents)]
        return Corpus(name, lambda: ArrayTokens.of(name, pieces), 8, 0.25)

    sources = [
        Source(corpus(name, number, 12 + 12 * number), number=number) for number, name in enumerate("abb")
    ]
    for source in sources:
        source.corpus.spans  # noqa: B018 - opened, as those that have samples are
    return Dataset(tuple(sources), separate_documents=separate)


@pytest.mark.ranks(4, timeout=120)
def test_documents_apart_and_sources_have_their_losses_in_every_layout() -> None:
    for separate in (True, False):
        dataset = _several(separate)
        reference = Trainer(_config(), Mesh.single(), dataset=dataset)
        expected = reference.evaluate()
        assert expected is not None
        assert list(expected.losses) == ["a", "b", "b (2)"]
        weighed = 0.0
        for source in validation_sources(dataset):
            alone = evaluate(reference.parts, reference.mesh, [source], None, BYTES)
            assert alone is not None
            assert expected.losses[source.name] == pytest.approx(alone.loss, rel=1e-12)
            weighed += alone.loss * alone.tokens
        assert expected.loss == pytest.approx(weighed / expected.tokens, rel=1e-12)
        inputs = 8 * dataset.num_validation
        assert (expected.tokens < inputs) if separate else (expected.tokens == inputs)
        for sizes in ({"dp": 2, "cp": 2}, {"pp": 2, "tp": 2}):
            mesh = Mesh.of(sizes)
            found = Trainer(_config("zero.stage=3"), mesh, dataset=dataset).evaluate()
            assert found is not None
            assert found.tokens == expected.tokens
            assert found.losses == pytest.approx(expected.losses, rel=1e-12)
            assert (found.loss, found.bits_per_byte) == pytest.approx(
                (expected.loss, expected.bits_per_byte), rel=1e-12
            )
            mesh.close()


def test_a_large_validation_set_is_read_a_round_at_a_time() -> None:
    trainer = Trainer(_config(), Mesh(), dataset=_dataset(0))
    held: list[int] = []
    source = _source("many", 100)
    asked: list[int] = []

    def read(numbers: NDArray[np.int64]) -> MicroBatch:
        asked.extend(numbers.tolist())
        return source.read(numbers)

    evaluated = trainer.parts.pipeline.evaluate

    def seen(inputs: list[Tensor], *rest: object, **named: object) -> object:
        held.append(len(inputs))
        assert sum(held) == len(asked)  # nothing was read ahead
        return evaluated(inputs, *rest, **named)  # type: ignore[arg-type]

    with mock.patch.object(trainer.parts.pipeline, "evaluate", seen):
        assert _evaluated(trainer, replace(source, read=read)).tokens == 800
    assert held == [32, 32, 32, 4]


def test_bits_per_byte_are_the_same_in_every_tokenizer_for_a_text_that_is_as_likely() -> None:
    """A uniform model over k tokens, each of n bytes, finds a byte as likely as one over k^(1/n) of a byte each."""
    found: dict[str, float] = {}
    sizes: Mapping[str, tuple[int, int]] = {"bytes": (16, 1), "pairs": (256, 2)}
    for name, (vocab, length) in sizes.items():
        trainer = Trainer(_config(f"model.vocab={max(vocab, 256)}"), Mesh(), dataset=_dataset(0))

        def uniform(output: Tensor, targets: Tensor, vocab: int = vocab) -> Tensor:
            return (targets != IGNORED).sum().double() * math.log(vocab) + 0.0 * output.sum()

        for stage in trainer.parts.pipeline.stages.values():
            stage._loss = uniform
        evaluation = _evaluated(trainer, _source(name, 4), sizes=np.full(vocab, length, np.int32))
        assert evaluation.loss == pytest.approx(math.log(vocab))
        assert evaluation.bits_per_byte is not None
        found[name] = evaluation.bits_per_byte
    assert found["bytes"] == pytest.approx(4.0, rel=1e-12)
    assert found["pairs"] == pytest.approx(4.0, rel=1e-12)


def test_a_run_counts_the_bytes_of_its_own_tokenizer(tmp_path: Path) -> None:
    """Whoever finds each byte of a text equally likely has the same bits per byte, however the text is cut."""
    folder = saved(byte_level(), tmp_path / "words")
    for name in ("byte", str(folder)):
        config = _config(f"data.tokenizer={name}", "run.eval_samples=all")
        words = tokenizer_of(config)
        documents = [np.append(words.encode(text), words.end_of_text) for text in WORDS * 4]
        dataset = Dataset.cut(ArrayTokens.of("text", documents), 8, 0.5)
        trainer = Trainer(config, Mesh(), dataset=dataset)
        each = torch.from_numpy(words.token_bytes).double() * 3 * math.log(2)

        def three_bits_a_byte(output: Tensor, targets: Tensor, each: Tensor = each) -> Tensor:
            return each[targets].sum() + 0.0 * output.sum()

        for stage in trainer.parts.pipeline.stages.values():
            stage._loss = three_bits_a_byte
        found = trainer.evaluate()
        assert found is not None
        assert found.bits_per_byte == pytest.approx(3.0, rel=1e-12)
        assert (found.loss > 3.0) == (name != "byte")  # a token of several bytes costs more


@pytest.mark.ranks(2)
def test_ends_of_documents_are_no_bytes_and_text_that_is_not_known_has_no_bits() -> None:
    mesh = Mesh(dp=2)
    trainer = _numbered(Trainer(_config(), mesh, dataset=_dataset(0)))
    # Samples 0, 1, 2: token 0 ends documents, its loss is 0 here, its bytes are none.
    found = _evaluated(trainer, _source("three", 3))
    assert found.loss == 1.0
    assert found.bits_per_byte == pytest.approx(24.0 / math.log(2) / 16)
    assert _evaluated(trainer, _source("only ends", 1)).bits_per_byte is None
    # One replica alone has the token that the tokenizer does not have.
    assert _evaluated(trainer, _source("three", 3), sizes=BYTES[:2]).bits_per_byte is None
    assert evaluate(trainer.parts, mesh, [], None, BYTES) is None
    assert Trainer(_config(), mesh, dataset=_dataset(0)).evaluate() is None
    mesh.close()
