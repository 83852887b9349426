"""Reading configurations: what is accepted, and what an error says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.launcher.config import Config, RecomputeEvery
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import config_text, load_config, read_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.strict_yaml import load
from shardweave.models import PRESETS, preset
from shardweave.tensor_parallel import RotaryScaling

# The schema of the project's contract and what has been added since (stop_grace), every key with its default.
CONTRACT = """
run:        {name: quickstart, dir: runs, steps: 60, stop_after: null, stop_grace: null, restarts: 0, seed: 1234,
             device: auto, eval_every: 20, eval_samples: 64,
             sample_every: 0, sample_prompt: "", sample_tokens: 100, log_every: 1}
model:
  preset: null
  weights: null
  layers: 4
  hidden: 128
  heads: 4
  kv_heads: null
  head_dim: null
  ffn: null
  vocab: auto
  sequence: 128
  position: alibi
  rotary_base: 10000.0
  rotary_fraction: 1.0
  rotary_scaling: null
  norm: layernorm
  norm_eps: 1.0e-5
  embedding_norm: true
  qk_norm: false
  parallel_residual: false
  activation: gelu
  bias: null
  attention_bias: null
  mlp_bias: null
  tie_embeddings: true
  dropout: 0.0
  attention_dropout: 0.0
  experts: 0
  experts_per_token: 2
  expert_capacity: null
  balance_loss: 0.01
  z_loss: 0.0
  router_bias: 0.0
  head_z_loss: 0.0
data:       {source: builtin, tokenizer: byte, end_of_text: auto, field: text, validation: 0.05,
             validation_source: null, separate_documents: false, workers: 1, log_samples: false}
parallel:   {data: auto, tensor: 1, pipeline: 1, context: 1, context_form: ring, expert: 1, sequence: true,
             keep_inputs: false, decomposed: false, schedule: 1f1b, chunks: 1}
zero:       {stage: 1, offload: none, prefetch: auto, max_live_parameters: auto, keep_gathered: auto,
             shard_between_micro_batches: auto, gradient_dtype: auto, reduce_dtype: auto, replicas: 1}
batch:      {global: 16, micro: 2, chunked_loss: false}
optimizer:  {name: adamw, lr: 1.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1,
             clip: 1.0, schedule: cosine, warmup: 10, min_lr: 1.0e-4}
precision:  fp32
recompute:  none
compile:    false
comm:       {hierarchy: auto, shared_memory: true, bucket_mb: 25, timeout: 300, debug: false, compression: none,
             density: 0.01, rank: 4, warmup: 10}
checkpoint: {every: 20, keep: 2, async: true, resume: auto}
guard:      {nonfinite: skip, spike: warn, max_skips: 10, max_rollbacks: 10}
metrics:    {tensorboard: false, console: auto, statistics: 0}
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def _error(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_the_defaults_are_the_contracts(tmp_path: Path) -> None:
    assert Config().plain() == load(CONTRACT, "contract").value
    loaded = read_config(_write(tmp_path, CONTRACT))
    assert loaded.config == Config() == load_config()
    assert loaded.warnings == ()  # a default never has "no effect"


def test_printed_configuration_reads_back_equal(tmp_path: Path) -> None:
    overrides = [
        "run.name=on",
        "run.dir='3e-4'",
        "data.source='12:30:00'",
        "optimizer.eps=1e-12",
        "optimizer.betas=[0.8, 0.999]",
        "optimizer.clip=null",
        "parallel.data=4",
        "batch.global=32",
    ]
    config = load_config(None, overrides)
    assert load_config(_write(tmp_path, config_text(config))) == config
    assert (config.run.name, config.run.dir) == ("on", "3e-4")
    assert config.data.source == "12:30:00"


def test_blocks_that_are_not_built_yet_parse_and_read_back() -> None:
    raw = {
        "recompute": {"every": 2},
        "data": {"source": [{"source": "a.txt", "weight": 0.7}, {"source": "b.txt"}]},
    }
    config = Config.model_validate(raw)
    assert config.recompute == RecomputeEvery(every=2)
    assert Config.model_validate(load(config_text(config), "x").value) == config


def test_an_empty_file_and_empty_blocks_are_the_defaults(tmp_path: Path) -> None:
    assert load_config(_write(tmp_path, "# nothing\n")) == Config()
    assert load_config(_write(tmp_path, "model:\n  # layers: 3\nrun:\n")) == Config()


def test_numbers(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, "run: {steps: 1e3}\noptimizer: {lr: 3e-4}\ncomm: {timeout: 30}\n"))
    assert config.run.steps == 1000
    assert type(config.run.steps) is int
    assert config.optimizer.lr == 3e-4


def test_overrides_win_and_the_last_one_most(tmp_path: Path) -> None:
    path = _write(tmp_path, "parallel: {tensor: 4}\nrun:\n")
    config = load_config(
        path, ["parallel.tensor=1", "parallel.tensor=2", "run.steps=7", "optimizer={lr: 0.5, warmup: 0}"]
    )
    assert config.parallel.tensor == 2
    assert config.run.steps == 7
    assert (config.optimizer.lr, config.optimizer.warmup, config.optimizer.clip) == (0.5, 0, 1.0)


def test_a_preset_gives_way_to_the_keys_that_are_given() -> None:
    config = load_config(None, ["model.preset=llama-3-8b", "model.layers=2"])
    assert (config.model.layers, config.model.hidden, config.model.kv_heads) == (2, 4096, 8)
    assert (config.model.norm, config.model.vocab, config.model.embedding_norm) == ("rmsnorm", 128256, False)


def test_a_presets_rotary_scaling_is_keys_like_others() -> None:
    config = load_config(None, ["model.preset=llama-3.1-8b", "model.layers=2"])
    scaling = config.model.rotary_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original) == ("llama3", 8.0, 8192)
    assert transformer_config(config) == preset("llama-3.1-8b", layers=2)
    again = Config.model_validate(config.plain())
    assert transformer_config(again) == transformer_config(config)
    assert (
        load_config(None, ["model.preset=llama-3.1-8b", "model.rotary_scaling=null"]).model.rotary_scaling
        is None
    )
    yarn = ["model.position=rotary", "model.rotary_scaling={kind: yarn, factor: 4, original: 64}"]
    assert transformer_config(load_config(None, yarn)).rotary_scaling == RotaryScaling(
        kind="yarn", factor=4.0, original=64
    )
    without = transformer_config(load_config(None, ["model.preset=gpt-neox-20b", "model.position=alibi"]))
    assert (without.rotary_fraction, without.parallel_residual) == (1.0, True)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_the_models_own(name: str) -> None:
    assert transformer_config(load_config(None, [f"model.preset={name}"])) == preset(name)


def test_b116_a_wrong_letter_at_the_top_in_a_block_and_a_key_in_the_wrong_block(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "run: {steps: 3}\noptimiser: {lr: 1}\nparallel:\n  tensr: 2\n  ppp: 3\noptimizer:\n  global: 8\n",
    )
    lines = _error(path).splitlines()
    for number, key in (
        (2, "`optimizer`"),
        (4, "`parallel.tensor`"),
        (5, "`parallel.pipeline`"),
        (7, "`batch.global`"),
    ):
        assert any(line.startswith(f"{path}:{number}: ") and key in line for line in lines)
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps='3'", 'run.steps: "3" is not allowed; it must be a whole number'),
        ("run.steps=1.5", "run.steps: 1.5 is not allowed; it must be a whole number"),
        ("run.steps=true", "run.steps: true is not allowed; it must be a whole number"),
        ("run.steps=0", "run.steps: 0 is not allowed; it must be at least 1"),
        ("run.name=3", 'run.name: 3 is not allowed; it must be text: put it in quotes, "3"'),
        ("run.name=a/b", "run.name: a/b is not allowed; it must be a plain name: no slashes"),
        ("run.name=..", "run.name: .. is not allowed; it must be a plain name: no slashes"),
        ("optimizer.lr=fast", "optimizer.lr: fast is not allowed; it must be a number"),
        ("optimizer.lr=.inf", "optimizer.lr: inf is not allowed; it must be a finite number"),
        ("optimizer.betas=[1]", "optimizer.betas[0]: 1 is not allowed; it must be less than 1"),
        ("optimizer.betas=0.9", "optimizer.betas: 0.9 is not allowed; it must be a list"),
        ("model.position=alibbi", "it must be learned, rotary or alibi. Did you mean `alibi`?"),
        ("parallel.data=all", "parallel.data: all is not allowed; it must be auto or a whole number"),
        ("parallel.data=0", "parallel.data: 0 is not allowed; it must be auto or at least 1"),
        ("zero.stage=4", "zero.stage: 4 is not allowed; it must be at most 3"),
        ("checkpoint.async=on", "checkpoint.async: on is not allowed; it must be true or false"),
        (
            "recompute=ful",
            "it must be none, selective, full, {every: N} or {operations: [...]}. Did you mean `full`?",
        ),
        (
            "recompute={ever: 2}",
            "recompute: {ever: 2} is not allowed; it must be {every: N} or {operations: [...]}",
        ),
        ("data.source=[{sourc: a}]", "did you mean `data.source[0].source`?"),
        ("model=3", "model: 3 is not allowed; it must be a block of keys"),
        ("model.preset=gpt3", "model.preset: 'gpt3' is not known; did you mean 'gpt2'?"),
        (
            "model.heads=3",
            "`model.heads: 3` does not divide `model.hidden: 128`; use 1, 2, 4, 8, 16, 32, 64 or 128",
        ),
        (
            "model.rotary_scaling={kind: yarn}",
            "{kind: yarn} is not allowed; it must be a block with the key `factor`",
        ),
        ("model.rotary_scaling={kind: ntk, factor: 2}", "model.rotary_scaling.kind: ntk is not allowed"),
        ("model.rotary_fraction=0", "model.rotary_fraction: 0 is not allowed; it must be more than 0"),
        ("model.mlp_bias=3", "model.mlp_bias: 3 is not allowed"),
        ("model.kv_heads=3", "model.kv_heads: 3 does not divide heads: 4; use 1, 2 or 4"),
        ("model.vocab=100", "`model.vocab: 100` is less than the byte tokenizer's 256 tokens"),
        ("run.steps.n=3", "run.steps"),
        ("parallel.tensor=[1", "command line: parallel.tensor:1: not valid YAML"),
        ("parallel", "`parallel` is not an override; write KEY=VALUE"),
        ("=3", "`=3` is not an override"),
        ("a-b=3", "`a-b=3` is not an override"),
        ('run.name="a\\0b"', r"run.name: 'a\x00b' is not allowed; it must be text on one line"),
        ("run.name=" + "ü" * 101, "at most 200 bytes"),
        ("run.seed=" + "9" * 2000, "command line: run.seed:1: a number of 2000 characters"),
        ("run.seed=1e30", "it must be at most 4611686018427387904"),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas: [0.9] is not allowed; it must be a list of at least 2 values",
        ),
        ("comm.timeout=1e300", "comm.timeout: 1e+300 is not allowed; it must be at most 604800"),
        (
            "model.hidden=999999999",
            "`model.heads: 4` does not divide `model.hidden: 999999999`; use 1, 3, 9, ",
        ),
        (
            "RUN.steps=3",
            "command line: RUN: there is no such key (its value is {steps: 3}); did you mean `run`?",
        ),
        (
            "recompute={operations: [atention]}",
            "it must be attention, linear, norm, activation or elementwise",
        ),
        ("recompute={operations: []}", "recompute.operations: [] is not allowed"),
        ("checkpoint.resume=true", "checkpoint.resume: true is not allowed; it must be text"),
        ("tp=2", "the nearest key is `parallel.tensor`"),
        ("dp=2", "the nearest key is `parallel.data`"),
    ],
)
def test_errors_name_path_value_rule_and_choice(override: str, expected: str) -> None:
    text = _error(None, override)
    assert expected in text
    assert len(text.splitlines()) == 1


def test_an_override_inside_a_value_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, "precision: fp32\nparallel: 3\nrun: {steps: 3}\n")
    assert "parallel is given as a value" in _error(path, "parallel.tensor=2")
    assert "`run.steps` is a value, not a block of keys" in _error(
        path.with_name("run.yaml"), "run.steps.n=2"
    )


def test_errors_in_files_have_lines_and_overrides_are_named(tmp_path: Path) -> None:
    path = _write(tmp_path, "optimizer:\n  lr: 1e-3\n  betas:\n    - 0.9\n    - 1.5\n")
    assert _error(path).startswith(f"{path}:5: optimizer.betas[1]: 1.5 is not allowed")
    assert _error(path, "optimizer.betas=[0.9, 2]").startswith("command line: optimizer.betas[1]: 2 is not")
    assert _error(_write(tmp_path, "run:\n steps: 1\n steps: 2\n")).startswith(
        f"{path}:3: `run.steps` is given twice"
    )
    assert _error(_write(tmp_path, "- a\n")).startswith(f"{path}:1: a configuration is made of")


def test_a_dotted_key_in_a_file_and_one_like_no_other(tmp_path: Path) -> None:
    text = _error(_write(tmp_path, "parallel.tensor: 2\n"))
    assert "dotted keys are for the command line; in a file write `parallel: {tensor: 2}`" in text
    assert "it is like none that there is (keys here: run, model, " in _error(_write(tmp_path, "3: 4\n"))


def test_a_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    path = _write(tmp_path, "")
    text = _error(tmp_path / "rum.yaml")
    assert text == f"{tmp_path / 'rum.yaml'}: there is no such file; there is {path}"
    assert "an override comes after" in _error(Path("parallel.tensor=2"))
    assert _error(tmp_path).startswith(f"{tmp_path}: ")  # a directory
    assert "this is not the name of a file" in _error(Path("a\0b"))
