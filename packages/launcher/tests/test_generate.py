"""Text from checkpoints, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from packages.launcher.tests.commands import run

from shardweave.comm import Mesh
from shardweave.launcher.checkpoint import save
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.generate import generate_text, load_model
from shardweave.launcher.reading import config_text, load_config
from shardweave.launcher.sampling import Sampling
from shardweave.launcher.shape import resolved
from shardweave.launcher.trainer import Trainer

SETTINGS = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.sequence=8", "batch.global=4"]


def _run(path: Path, *overrides: str) -> Trainer:
    config = load_config(None, [*SETTINGS, *overrides])
    path.mkdir()
    (path / "config.yaml").write_text(config_text(resolved(config, data=1)))
    tokens = np.random.default_rng(5).integers(1, 256, 8 * 40 + 1).astype(np.uint8)
    trainer = Trainer(config, Mesh(), dataset=Dataset.of_tokens(tokens, 8))
    for _ in range(2):
        trainer.train_step()
        save(trainer, path / "checkpoints", keep=2)
    return trainer


def _sample(path: Path, prompt: str = "ab", *, temperature: float = 0.7, seed: int = 3) -> int:
    return generate_text(path, [prompt], Sampling(tokens=12, temperature=temperature, seed=seed))


def test_the_newest_checkpoint_or_the_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = _run(tmp_path / "run", "optimizer.lr=0.05", "optimizer.warmup=0")
    step1, step2 = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [_sample(tmp_path / "run"), _sample(step2), _sample(step1)] == [0, 0, 0]
    first, second, other = (text for text in capsys.readouterr().out.split("ab") if text)
    assert first == second != other
    model = load_model(tmp_path / "run", step2)
    for name, values in trainer.full_parameters().items():
        assert torch.equal(model.get_parameter(name), values), name


def test_a_run_with_experts_is_read_with_the_biases_of_its_routers(tmp_path: Path) -> None:
    trainer = _run(tmp_path / "run", "model.experts=4", "model.router_bias=0.05", "model.expert_capacity=1.0")
    [_, step2] = sorted((tmp_path / "run" / "checkpoints").iterdir())
    model = load_model(tmp_path / "run", step2)
    for name, bias in trainer.parts.buffers().items():
        assert torch.equal(model.get_buffer(name), bias), name
        assert bias.abs().max() > 0
    assert _sample(tmp_path / "run") == 0


def test_a_seed_repeats_and_temperature_0_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path / "run")
    texts = []
    for temperature, seed in ((0.7, 3), (0.7, 3), (0.7, 4), (0, 3), (0, 4)):
        assert _sample(tmp_path / "run", temperature=temperature, seed=seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]


def test_what_is_not_a_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _sample(tmp_path) == 2
    assert "is not the directory of a run: it has no config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("")
    assert _sample(tmp_path) == 2
    assert "has no whole checkpoint yet" in capsys.readouterr().err
    _run(tmp_path / "run")
    assert _sample(tmp_path / "run", "") == 2
    assert "--prompt is empty" in capsys.readouterr().err
    (tmp_path / "run" / "config.yaml").write_text("model: {layers: 3, hidden: 16, heads: 2}")
    assert _sample(tmp_path / "run") == 2
    assert "holds another model than" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "rank-00000.safetensors").write_bytes(b"x")
    assert _sample(tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "should have" in said
    assert "give an earlier checkpoint instead of the run: " in said
    assert said.rstrip().endswith("checkpoints/step-00000001")


@pytest.mark.timeout(120)
def test_on_ranks_the_text_is_that_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank reads its own part, biases of routers among it; two prompts are two micro-batches."""
    _run(tmp_path / "run", "model.experts=4", "model.router_bias=0.05", "model.sequence=32")
    assert generate_text(tmp_path / "run", ["ab", "the "], Sampling(tokens=12, top_k=40, seed=3)) == 0
    alone = capsys.readouterr().out
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2")
    asked = ("--prompt", "ab", "--prompt", "the ", "--tokens", "12", "--top-k", "40", "--seed", "3")
    status, out, err = run(tmp_path, "generate", "run", *asked, *layout)
    assert (status, out, err) == (0, alone, "")
    assert alone.startswith("ab")
    assert "\nthe " in alone
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "rank-00000.safetensors").write_bytes(b"x")
    status, out, err = run(tmp_path, "generate", "run", *asked, "parallel.pipeline=2")
    assert (status, out) == (2, "")
    assert "rank-00000.safetensors has 1 bytes" in err
    assert "give an earlier checkpoint instead of the run: " in err


def test_on_ranks_mistakes_are_said_before_one_starts(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    for setting, said in (
        ("parallel.data=2", "`parallel.data=2`: generate takes parallel.tensor, parallel.pipeline, "),
        ("parallel.tensor=3", "`parallel.tensor: 3` does not divide `model.heads: 2`"),
    ):
        status, out, err = run(tmp_path, "generate", "run", "--prompt", "a", setting)
        assert (status, out) == (2, "")
        assert said in err


def test_a_text_ends_where_the_model_ends_it_unless_it_is_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that sees nothing but the ends of documents ends its text at once."""
    config = load_config(None, [*SETTINGS, "optimizer.lr=0.3", "optimizer.warmup=0"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_text(resolved(config, data=1)))
    trainer = Trainer(config, Mesh(), dataset=Dataset.of_tokens(np.zeros(8 * 40 + 1, np.uint8), 8))
    save(trainer, tmp_path / "run" / "checkpoints", keep=0)
    for _ in range(20):
        trainer.train_step()
    save(trainer, tmp_path / "run" / "checkpoints", keep=0)
    for ignore_end, text in ((False, "ab\n"), (True, "ab" + "\n\n" * 3 + "\n")):
        sampling = Sampling(tokens=3, temperature=0, ignore_end=ignore_end)
        assert generate_text(tmp_path / "run", ["ab"], sampling) == 0
        assert capsys.readouterr() == (text, "")
    first = tmp_path / "run" / "checkpoints" / "step-00000000"
    assert _sample(first) == 0
    assert "is of step 0: this model has seen no training yet" in capsys.readouterr().err
