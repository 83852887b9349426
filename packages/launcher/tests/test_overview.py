"""The lines over a run and of a dry run: what is held, and how it is shared."""

from __future__ import annotations

import numpy as np
import pytest

from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.layout import layout_of
from shardweave.launcher.overview import Overview
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config

DATASET = Dataset.of_tokens(np.zeros(8 * 40 + 1, np.uint8), 8)


def overview_of(*overrides: str) -> Overview:
    small = ["model.sequence=8", "model.vocab=256", "batch.global=16", "parallel.data=4", *overrides]
    config = load_config(None, small)
    return Overview.of(config, layout_of(config), DATASET)


def memory_line(*overrides: str) -> str:
    return dict(overview_of(*overrides).header())["memory"]


def test_what_each_stage_holds() -> None:
    """826,368 parameters in fp32 over four ranks; the gradients of several micro-batches are held whole."""
    parameters, part = "3.15 MiB", "807 KiB"
    once, several = "batch.micro=4", "batch.micro=2"
    for stage, first, gradients, states in (
        (0, parameters, parameters, "6.3 MiB"),
        (1, parameters, parameters, "1.58 MiB"),
        (2, parameters, part, "1.58 MiB"),
        (3, "2.43 MiB with 1.64 MiB gathered at a time", part, "1.58 MiB"),
    ):
        line = memory_line(f"zero.stage={stage}", once)
        assert f"(parameters {first}, gradients {gradients}, optimizer {states}, activations" in line
        line = memory_line(f"zero.stage={stage}", several)
        assert f"(parameters {first}, gradients {parameters}, optimizer {states}, activations" in line


def test_what_is_gathered_follows_the_settings() -> None:
    stage = ("zero.stage=3", "batch.micro=4")
    assert "with 904 KiB gathered at a time" in memory_line(*stage, "zero.prefetch=0")
    assert "with 3.15 MiB gathered at a time" in memory_line(*stage, "zero.keep_gathered=1000000")
    assert "with 1.14 MiB gathered at a time" in memory_line(*stage, "zero.max_live_parameters=300000")
    assert "gathered" not in memory_line(*stage, "zero.replicas=4")  # each rank has a copy of its own
    with pytest.raises(ConfigError, match=r"`zero.max_live_parameters: 200000` is less than the 231552"):
        overview_of(*stage, "zero.max_live_parameters=200000")


def test_every_stage_of_a_pipeline_has_its_own() -> None:
    lines = [
        text for _, text in overview_of("zero.stage=3", "parallel.data=2", "parallel.pipeline=2").details()
    ]
    assert sum(" gathered at a time, gradients " in line for line in lines) == 2


def test_a_chunked_loss_holds_fewer_logits_and_kept_inputs_are_more() -> None:
    """Two sequences of 8 tokens: their logits are kept and have a gradient, or are made twice and never kept."""

    def activations(*overrides: str) -> int:
        return overview_of("model.vocab=200000", "parallel.data=2", *overrides).largest[0].activations

    hidden, logits = 16 * 128 * 4, 16 * 200_000 * 4
    assert activations() - activations("batch.chunked_loss=true") == logits
    split = ("parallel.tensor=2", "batch.chunked_loss=true")
    assert activations(*split, "parallel.keep_inputs=true") - activations(*split) == 2 * 4 * hidden // 2


def test_a_rank_with_both_ends_counts_a_tied_embedding_once() -> None:
    stages = ("model.layers=6", "parallel.pipeline=2", "batch.global=8", "batch.micro=1", "zero.stage=0")
    tied, apart = (
        overview_of(*stages, "parallel.schedule=zb-v", f"model.tie_embeddings={tied}")
        for tied in ("true", "false")
    )
    embedding = 4 * tied.shape.vocab * tied.shape.hidden
    assert apart.memory[0][0].parameters - tied.memory[0][0].parameters == embedding
    assert apart.memory[1][0].parameters == tied.memory[1][0].parameters
    assert sum(uses[0].parameters for uses in tied.memory) == 4 * tied.parameters
    told = [(label, text) for label, text in tied.details() if label.startswith("stage")]
    assert [label for label, _ in told] == ["stage 0", "stage 3", "stage 1", "stage 2"]
    assert "zb-v, 2 stages a rank, with" in dict(tied.header())["layout"]


def test_what_is_computed_again_is_said_and_counted() -> None:
    plain, again = overview_of(), overview_of("recompute=full")
    assert again.memory[0][0].activations < plain.memory[0][0].activations
    header, details = dict(again.header()), dict(again.details())
    assert ", recomputing full" in header["layout"]
    assert ", and " in details["work"]
    assert details["work"].endswith(" a step again in backward")
    half = dict(overview_of("recompute={every: 2}").details())["work"]
    amounts = [float(text.split("and ")[1].split(" ")[0]) for text in (half, details["work"])]
    assert amounts[1] == pytest.approx(2 * amounts[0], rel=1e-3)
    assert "recomputing" not in dict(plain.header())["layout"]
    assert "again" not in dict(plain.details())["work"]
