"""Settings that do nothing, that contradict each other, and that are not built yet."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.launcher.config import Config
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config, read_config
from shardweave.launcher.unbuilt import table, unbuilt


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "parallel.schedule=gpipe",
            "`parallel.schedule: gpipe` has no effect because `parallel.pipeline` is 1",
        ),
        (
            "parallel.sequence=false",
            "`parallel.sequence: false` has no effect because `parallel.tensor` is 1",
        ),
        (
            "parallel.keep_inputs=true",
            "`parallel.keep_inputs: true` has no effect because `parallel.tensor` is 1",
        ),
        (
            "parallel.decomposed=auto",
            "`parallel.decomposed: auto` has no effect because `parallel.tensor` is 1",
        ),
        (
            "parallel.context_form=all-to-all",
            "`parallel.context_form: all-to-all` has no effect because `parallel.context` is 1",
        ),
        ("model.z_loss=0.1", "`model.z_loss: 0.1` has no effect because `model.experts` is 0"),
        ("model.router_bias=0.1", "`model.router_bias: 0.1` has no effect because `model.experts` is 0"),
        ("parallel.expert=2", "`parallel.expert: 2` has no effect because `model.experts` is 0"),
        ("comm.density=0.5", "has no effect because `comm.compression` is none"),
        ("run.stop_after=60", "has no effect because the run ends after `run.steps: 60` anyway"),
        ("zero.shard_between_micro_batches=true", "has no effect because `zero.stage` is below 2"),
        ("zero.prefetch=2", "`zero.prefetch: 2` has no effect because `zero.stage` is below 3"),
        ("zero.max_live_parameters=9", "has no effect because `zero.stage` is below 3"),
        ("zero.keep_gathered=9", "has no effect because `zero.stage` is below 3"),
        ("guard.max_skips=3", None),
    ],
)
def test_b118_idle_settings_are_named_with_the_reason(override: str, reason: str | None) -> None:
    warnings = read_config(None, [override]).warnings
    if reason is None:
        assert warnings == ()
    else:
        assert len(warnings) == 1
        assert warnings[0].startswith("command line: ")
        assert reason in warnings[0]


def test_interleaving_one_stage_per_rank_is_said_to_be_1f1b() -> None:
    on_two = ["parallel.schedule=interleaved", "parallel.pipeline=2"]
    (text,) = read_config(None, on_two).warnings
    assert "`parallel.schedule: interleaved` is 1f1b with `parallel.chunks: 1`: use parallel.chunks=2" in text
    assert not read_config(None, [*on_two, "parallel.chunks=2"]).warnings


def test_b118_chunks_with_one_stage_and_recompute_beyond_the_layers_are_errors() -> None:
    with pytest.raises(
        ConfigError, match=r"`parallel.chunks: 2` has no effect because `parallel.pipeline` is 1"
    ):
        load_config(None, ["parallel.chunks=2"])
    with pytest.raises(
        ConfigError, match=r"recompute: {every: 9}` has no effect because `model.layers: 4` is less"
    ):
        load_config(None, ["recompute={every: 9}"])


def test_blocks_that_run_again_are_not_compiled() -> None:
    for mode in ("full", "{every: 2}", "{operations: [attention]}"):
        with pytest.raises(
            ConfigError, match=r"`compile: true` does not go with `recompute: .* use recompute=none or"
        ):
            load_config(None, ["compile=true", f"recompute={mode}"])
    for mode in ("none", "selective"):
        assert load_config(None, ["compile=true", f"recompute={mode}"]).compile


def test_compression_keeps_what_is_not_sent_for_one_axis() -> None:
    spread = ["model.experts=4", "parallel.expert=2", "parallel.data=2"]
    with pytest.raises(
        ConfigError, match=r"`comm.compression: topk` does not go with `parallel.expert: 2`: .* use comm"
    ):
        load_config(None, [*spread, "comm.compression=topk"])
    load_config(None, ["model.experts=4", "comm.compression=topk"])
    load_config(None, [*spread[1:], "comm.compression=topk"])  # without experts nothing is spread


def test_b118_defaults_written_out_are_never_idle() -> None:
    config = Config()
    spelled = [
        f"{block}.{key}={'null' if value is None else str(value).lower()}"
        for block, keys in config.plain().items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    ]
    for layout in (
        [],
        ["parallel.tensor=2", "parallel.pipeline=2"],
        ["data.validation=0"],
        ["checkpoint.every=0"],
    ):
        loaded = read_config(None, spelled + layout)
        assert loaded.warnings == ()


def test_a_learning_rate_below_the_default_floor_is_fine_and_below_an_asked_one_is_not() -> None:
    assert load_config(None, ["optimizer.lr=1e-5"]).optimizer.lr == 1e-5
    with pytest.raises(ConfigError, match=r"`optimizer.min_lr: 0.5` is above `optimizer.lr: 0.1`"):
        load_config(None, ["optimizer.lr=0.1", "optimizer.min_lr=0.5"])


def _with(path: tuple[str, ...], value: Any) -> Config:
    raw: dict[str, Any] = {path[0]: value} if len(path) == 1 else {path[0]: {path[1]: value}}
    return Config.model_validate(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("zero", "offload"), "cpu"),
        (("zero", "offload"), "disk"),
        (("metrics", "tensorboard"), True),
    ],
)
def test_what_is_not_built_parses_and_is_refused_by_name(path: tuple[str, ...], value: Any) -> None:
    problems = list(unbuilt(_with(path, value)))
    assert [problem.path for problem in problems] == [path]
    assert f"`{'.'.join(path)}: " in problems[0].text
    assert "is not built yet; use " in problems[0].text


def test_defaults_are_built_and_every_row_is_about_a_key() -> None:
    assert list(unbuilt(Config())) == []
    plain = Config().plain()
    for row in table:
        value: Any = plain
        for part in row.path:
            value = value[part]
        assert not row.refused(value)
