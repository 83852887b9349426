"""Texts that a model makes while it is trained: the same in every layout, and nothing of the training is touched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from packages.launcher.tests.commands import SHORT, run
from packages.launcher.tests.small_tokenizers import byte_level

from shardweave.comm import Mesh
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.data.file_tokenizer import FileTokenizer, read_tokenizer
from shardweave.launcher.data.tokenizer import ByteTokenizer
from shardweave.launcher.layout import layout_of
from shardweave.launcher.prompts import prompt_tokens, text_of
from shardweave.launcher.reading import load_config, read_config
from shardweave.launcher.trainer import StepResult, Trainer
from shardweave.launcher.training_texts import sampled_text, shown
from shardweave.models import Transformer, generate

SETTINGS = [
    "model.layers=2", "model.hidden=16", "model.heads=2", "model.sequence=16", "batch.global=4", "batch.micro=1",
    "optimizer.lr=0.05", "optimizer.warmup=0", "run.sample_every=1", "run.sample_prompt='the '", "run.sample_tokens=20",
    "model.dropout=0.2", "model.attention_dropout=0.2",
]  # fmt: skip


def _config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def _dataset() -> Dataset:
    return Dataset.of_tokens(np.random.default_rng(5).integers(1, 256, 16 * 40 + 1).astype(np.uint8), 16)


def _whole(trainer: Trainer) -> str:
    """What one process makes of the parameters and the biases of the routers that all ranks have together."""
    model = Transformer(trainer.parts.shape, dtype=torch.float64)
    full = trainer.full_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(full[name])
    prompt = prompt_tokens(ByteTokenizer(), "the ")
    found = generate(
        model, torch.tensor([prompt]), 20, temperature=0.8, generator=torch.Generator().manual_seed(0), end=0
    )
    return text_of(ByteTokenizer(), "the ", found[0].tolist())


LAYOUTS: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({"dp": 4}, ("zero.stage=3",)),
    ({"tp": 2, "dp": 2}, ("zero.stage=3", "batch.chunked_loss=true")),
    ({"cp": 2, "tp": 2}, ("model.position=rotary", "zero.stage=2")),
    ({"pp": 2, "tp": 2}, ("parallel.sequence=false",)),
    ({"pp": 2, "dp": 2}, ("model.position=learned", "parallel.schedule=zb-v", "batch.global=8")),
    ({"dp": 4, "ep": 2}, ("model.experts=4", "model.ffn=12", "zero.stage=3")),
)


@pytest.mark.ranks(4, timeout=180)
def test_at_every_layout_the_text_is_that_of_one_process_and_the_run_is_the_run_without() -> None:
    for sizes, more in LAYOUTS:
        mesh = Mesh.of(sizes)
        config = _config("precision=fp64", *more)
        with_texts, without = (Trainer(config, mesh, dataset=_dataset()) for _ in range(2))
        texts: list[str] = []
        for _ in range(2):
            before = torch.get_rng_state()
            texts.append(sampled_text(with_texts))
            assert torch.equal(torch.get_rng_state(), before)
            assert all(module.training for module in with_texts.parts.modules)
            assert texts[-1] == _whole(with_texts), (sizes, more)
            _same_to_the_bit(with_texts.train_step(), without.train_step())
        assert texts[0] != texts[1]  # the model has learned something
        for name, values in without.full_parameters().items():
            assert torch.equal(with_texts.full_parameters()[name], values), name
        mesh.close()


def _same_to_the_bit(got: StepResult, want: StepResult) -> None:
    assert (got.loss, got.grad_norm, got.skipped) == (want.loss, want.grad_norm, want.skipped)


@pytest.mark.ranks(2, timeout=120)
def test_narrow_formats_compression_and_a_capacity_are_left_alone_too() -> None:
    for more in (
        ["parallel.tensor=2", "model.experts=4", "model.expert_capacity=1.0", "model.router_bias=0.01"],
        ["comm.compression=onebit", "comm.warmup=0"],
        ["precision=fp16", "zero.stage=3", "zero.keep_gathered=100000"],
    ):
        config = _config("precision=bf16", *more)
        mesh = mesh_of(config, layout_of(config, 2))
        with_texts, without = (Trainer(config, mesh, dataset=_dataset()) for _ in range(2))
        for _ in range(3):
            assert sampled_text(with_texts).startswith("the ")
            _same_to_the_bit(with_texts.train_step(), without.train_step())
        mesh.close()


def test_a_text_ends_at_its_end_and_begins_where_no_prompt_is_given() -> None:
    words = ByteTokenizer()
    assert prompt_tokens(words, "") == [0]
    assert text_of(words, "", [0, 97, 98, 0, 99]) == "ab"
    assert text_of(words, "a", [97, 98, 0, 99]) == "ab"
    assert text_of(words, "a", [97, 98, 0, 99], ignore_end=True) == "ab\n\nc"
    assert text_of(words, "\udcff", [255, 98]) == "\ufffdb"
    assert text_of(words, "é", [*"é".encode(), 0xC3]) == "é\ufffd"


def test_a_prompt_of_a_real_tokenizer_comes_back_as_it_was(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    words: FileTokenizer = read_tokenizer(str(tmp_path))
    for prompt in ("It is a truth", " two  spaces ", "naïve – café\n", "<|endoftext|>", "\t日本"):
        tokens = prompt_tokens(words, prompt)
        assert words.end_of_text not in tokens
        assert text_of(words, prompt, [*tokens, *words.encode(" acknowledged, "), words.end_of_text]) == (
            prompt + " acknowledged, "
        )
    assert prompt_tokens(words, "") == [words.end_of_text]


def test_what_is_shown_is_short_and_printable() -> None:
    assert list(shown(3, "a\tb\x00\n\nc", "x")) == ["text at step 3:", "  | a   b\ufffd", "  | ", "  | c"]
    assert list(shown(3, "l\n" * 14, "x"))[-1] == "  | ... (2 more lines in x)"


@pytest.mark.timeout(120)
def test_the_command_keeps_texts_beside_the_metrics_and_resumes_them(tmp_path: Path) -> None:
    short = [
        *SETTINGS,
        f"data.source={SHORT}",
        "run.name=t",
        "run.steps=4",
        "run.device=cpu",
        "run.eval_every=0",
    ]
    short += ["run.sample_every=2", "parallel.tensor=2", "checkpoint.every=2"]
    status, out, err = run(tmp_path, "train", *short, "run.stop_after=3")
    assert (status, err) == (0, ""), out + err
    assert out.count("text at step ") == 2
    assert "  | the " in out
    file = tmp_path / "runs/t/texts.jsonl"
    first = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in first] == [2, 3]
    assert {line["prompt"] for line in first} == {"the "}
    assert all(line["text"].startswith("the ") for line in first)
    status, out, err = run(tmp_path, "train", *short)
    assert (status, err) == (0, ""), out + err
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [2, 3, 4]


def test_a_prompt_without_samples_is_told() -> None:
    [warning] = read_config(None, ["run.sample_prompt=a"]).warnings
    assert "`run.sample_every` is 0" in warning
