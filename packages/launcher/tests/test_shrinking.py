"""A small configuration of the same kind: what relates sizes to the layout is kept, whatever the sizes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packages.launcher.tests.small_tokenizers import byte_level, saved

from shardweave.launcher.config import Config, RecomputeEvery
from shardweave.launcher.layout import Layout, batch_plan, check_fit, layout_of
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.staging import staging_of
from shardweave.launcher.verify.shrinking import SMALL_PARAMETERS, SMALL_TOKENS, Shrunk, in_float64, shrink
from shardweave.models import PRESETS, count_parameters


def _shrunk(*overrides: str) -> tuple[Config, Layout, Shrunk]:
    config = load_config(None, overrides)
    layout = layout_of(config)
    return config, layout, shrink(config, layout)


def test_a_small_configuration_stays_as_it_is() -> None:
    config, _, shrunk = _shrunk("parallel.tensor=2", "parallel.data=2")
    assert shrunk == Shrunk(config)


def test_a_vocabulary_keeps_the_tokens_of_the_text(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    _, _, shrunk = _shrunk("model.preset=gpt2", "parallel.tensor=4", f"data.tokenizer={folder}")
    assert shrunk.config.model.vocab == 301  # of 300; 50257 leaves a remainder of 1, too
    assert shrunk.config.data.tokenizer == str(folder)


def test_gpt3_becomes_something_that_takes_seconds() -> None:
    config, layout, shrunk = _shrunk(
        "model.preset=gpt3-175b", "parallel.tensor=8", "parallel.pipeline=8", "batch.global=1536"
    )
    small = shrunk.config.model
    assert (small.layers, small.hidden, small.heads, small.vocab, small.sequence) == (8, 192, 24, 257, 16)
    assert (small.position, small.activation, small.dropout) == ("learned", "gelu_tanh", 0.1)
    assert (shrunk.config.batch.global_, shrunk.config.batch.micro) == (18, 2)
    assert count_parameters(transformer_config(shrunk.config)) < 5_000_000
    assert str(shrunk.changes[0]) == "model.layers 96 -> 8 (the same remainder over 8 stages)"
    assert shrunk.config.parallel == config.parallel
    assert [
        len(part.layers)
        for part in staging_of(shrunk.config, layout, transformer_config(shrunk.config)).parts
    ] == [1] * 8


def test_a_block_of_the_small_model_is_still_computed_again() -> None:
    _, _, shrunk = _shrunk("model.preset=gpt3-175b", "parallel.tensor=8", "recompute={every: 12}")
    assert (shrunk.config.model.layers, shrunk.config.recompute) == (2, RecomputeEvery(every=2))
    _, _, shrunk = _shrunk("model.preset=gpt3-175b", "parallel.tensor=8", "recompute={every: 2}")
    assert "recompute" not in str(shrunk.changes)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Eight key heads over two, eight and sixteen ranks: split, one each, copied.
        (("model.preset=llama-3-70b", "parallel.tensor=2"), (8, 4)),
        (("model.preset=llama-3-70b", "parallel.tensor=8"), (16, 8)),
        (("model.preset=llama-3-70b", "parallel.tensor=16"), (32, 8)),
        # 112 heads are not a power of two, which is another rule for ALiBi's slopes.
        (("model.preset=bloom-176b", "parallel.tensor=4"), (12, 12)),
        (("model.preset=gpt2-xl", "parallel.tensor=5"), (10, 10)),
        (("model.preset=llama-3-8b", "model.kv_heads=1", "parallel.tensor=4"), (8, 1)),
    ],
)
def test_heads_share_the_ranks_as_before(overrides: tuple[str, ...], expected: tuple[int, int]) -> None:
    small = transformer_config(_shrunk(*overrides)[2].config)
    assert (small.heads, small.num_kv_heads) == expected


def test_a_given_width_of_the_mlp_keeps_its_ratio_and_its_remainder() -> None:
    big, _, shrunk = _shrunk("model.preset=llama-3-8b", "parallel.tensor=3", "model.heads=36", "model.kv_heads=9",
                             "model.hidden=4608", "model.sequence=8190", "model.ffn=16001")  # fmt: skip
    small = transformer_config(shrunk.config)
    assert small.ffn_size % 3 == transformer_config(big).ffn_size % 3
    assert small.ffn_size / small.hidden == pytest.approx(16001 / 4608, rel=0.1)


def test_heads_of_a_width_of_their_own_stay_other_than_hidden() -> None:
    for head_dim, wider in ((128, True), (32, False)):
        _, _, shrunk = _shrunk("model.preset=gpt2", f"model.head_dim={head_dim}", "parallel.tensor=4")
        small = transformer_config(shrunk.config)
        assert small.head_size == shrunk.config.model.head_dim == 8
        assert (small.query_size > small.hidden) == wider
        assert (small.query_size < small.hidden) != wider


def test_the_part_of_a_head_that_rotary_turns_stays_pairs() -> None:
    rotary = ("model.preset=gpt2", "model.position=rotary", "model.heads=8")  # 96 wide
    for fraction, width in ((0.25, 8), (0.0625, 32), (1.0, 8)):
        _, _, shrunk = _shrunk(*rotary, f"model.rotary_fraction={fraction}")
        assert transformer_config(shrunk.config).head_size == width


def test_a_sequence_keeps_what_context_ranks_ask_of_it() -> None:
    for tensor, context in ((1, 4), (2, 2), (3, 2)):
        overrides = ["model.preset=gpt2", "model.sequence=960", "model.vocab=50256"]
        _, layout, shrunk = _shrunk(*overrides, f"parallel.context={context}", f"parallel.tensor={tensor}")
        small = transformer_config(shrunk.config)
        assert small.sequence < 64
        check_fit(shrunk.config, layout, small)


def test_heads_that_are_exchanged_go_on_to_divide() -> None:
    overrides = ["model.preset=llama-3-8b", "parallel.context_form=all-to-all", "parallel.context=4"]
    _, layout, shrunk = _shrunk(*overrides, "parallel.tensor=2")
    small = transformer_config(shrunk.config)
    assert (small.heads, small.num_kv_heads) == (16, 8)  # 8 heads and 4 key heads on a rank, before 16 and 4
    check_fit(shrunk.config, layout, small)


@pytest.mark.parametrize(
    ("experts", "visited", "ranks", "expected"),
    [
        (64, 8, 1, (4, 2)),
        (64, 8, 8, (16, 2)),  # several on each rank
        (8, 1, 8, (8, 1)),  # one on each
        (8, 8, 2, (4, 4)),  # all of them
        (3, 2, 1, (3, 2)),
    ],
)
def test_experts_are_spread_as_before(
    experts: int, visited: int, ranks: int, expected: tuple[int, int]
) -> None:
    _, layout, shrunk = _shrunk(
        "model.preset=gpt2", f"model.experts={experts}", f"model.experts_per_token={visited}",
        f"parallel.expert={ranks}", "model.expert_capacity=1.5", "model.router_bias=0.1",
    )  # fmt: skip
    small = transformer_config(shrunk.config)
    assert (small.experts, small.experts_per_token) == expected
    assert (small.expert_capacity, shrunk.config.model.router_bias) == (1.5, 0.1)
    check_fit(shrunk.config, layout, small)


def test_what_is_not_a_size_stays() -> None:
    overrides = (
        "model.preset=bloom-7b1", "parallel.tensor=2", "parallel.pipeline=3", "parallel.data=3",
        "parallel.schedule=gpipe", "zero.stage=2", "batch.global=24", "batch.micro=1", "model.dropout=0.1",
        "optimizer.name=sgd", "optimizer.clip=null", "optimizer.warmup=7", "run.seed=5", "precision=bf16",
    )  # fmt: skip
    config, _, shrunk = _shrunk(*overrides)
    sizes = {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"}
    before, after = config.plain(), shrunk.config.plain()
    for block in before:
        if block == "model":
            kept = before[block].keys() - sizes
            assert {key: before[block][key] for key in kept} == {key: after[block][key] for key in kept}
        elif block == "batch":
            # Four micro-batches: more than the stages.
            assert after[block] == before[block] | {"global": 12, "micro": 1}
        else:
            assert before[block] == after[block]


def test_float64_takes_narrower_gradients_with_it() -> None:
    config = load_config(None, ["precision=bf16", "zero.reduce_dtype=bf16", "zero.gradient_dtype=fp32"])
    exact = in_float64(Shrunk(config))
    assert exact.config.precision == "fp64"
    assert (exact.config.zero.reduce_dtype, exact.config.zero.gradient_dtype) == ("auto", "auto")
    assert [change.path[-1] for change in exact.changes] == ["precision", "gradient_dtype", "reduce_dtype"]
    assert in_float64(exact) == exact


@st.composite
def _configurations(draw: Any) -> list[str]:
    """Any layout over any sizes; those that do not fit are thrown away."""
    tensor, pipeline, data = (
        draw(st.sampled_from([1, 2, 3, 4, 8])),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
    )
    per_rank, group = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads = tensor * per_rank
    assume(heads % group == 0)
    position = draw(st.sampled_from(["alibi", "learned", "rotary"]))
    hidden = heads * draw(st.sampled_from([2, 4, 16, 64, 80] if position == "rotary" else [1, 3, 8, 64, 65]))
    ffn = draw(st.none() | st.integers(tensor, 20_000))
    micro = draw(st.integers(1, 5))
    own, expert = draw(st.sampled_from([0, 0, 1, 2, 16])), draw(st.sampled_from([1, data]))
    experts = own * expert
    return [
        f"model.experts={experts}", f"model.experts_per_token={draw(st.integers(1, min(experts, 8) or 2))}",
        f"parallel.expert={expert}",
        f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"parallel.data={data}",
        f"parallel.sequence={draw(st.sampled_from(['true', 'false']))}",
        f"model.layers={draw(st.integers(pipeline, 100))}", f"model.hidden={hidden}", f"model.heads={heads}",
        f"model.kv_heads={heads // group}", f"model.ffn={'null' if ffn is None else ffn}",
        f"model.vocab={draw(st.integers(256, 60_000))}", f"model.sequence={draw(st.integers(1, 4096))}",
        f"model.position={position}", f"model.activation={draw(st.sampled_from(['gelu', 'swiglu']))}",
        f"batch.micro={micro}", f"batch.global={micro * data * draw(st.integers(1, 20))}",
    ]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(_configurations())
def test_the_small_one_fits_the_layout_in_the_same_way(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    layout, big = layout_of(config), transformer_config(config)
    try:
        check_fit(config, layout, big)
    except ConfigError:
        assume(False)
    shrunk = shrink(config, layout)
    small, ranks, stages = transformer_config(shrunk.config), layout.tensor, layout.pipeline
    check_fit(shrunk.config, layout, small)
    before, after = batch_plan(config, layout), batch_plan(shrunk.config, layout)

    for key in ("layers", "hidden", "heads", "num_kv_heads", "vocab", "sequence", "head_size"):
        assert getattr(small, key) <= getattr(big, key)
    assert small.layers % stages == big.layers % stages
    assert small.layers >= min(2, big.layers)
    assert (small.vocab % ranks, small.sequence % ranks) == (big.vocab % ranks, big.sequence % ranks)
    assert small.ffn_size % ranks == big.ffn_size % ranks
    assert (small.experts > layout.expert) == (big.experts > layout.expert)
    assert (small.experts % layout.expert, small.experts > 0) == (0, big.experts > 0)
    if big.experts:
        assert (small.experts_per_token == 1) == (big.experts_per_token == 1)
        assert (small.experts_per_token == small.experts) == (big.experts_per_token == big.experts)
    assert (small.num_kv_heads == small.heads) == (big.num_kv_heads == big.heads)
    assert (small.num_kv_heads < ranks) == (big.num_kv_heads < ranks)
    if big.num_kv_heads < ranks:
        assert small.num_kv_heads == big.num_kv_heads
    assert (after.accumulation > 1) == (before.accumulation > 1)
    assert (after.accumulation >= stages) == (before.accumulation >= stages)
    assert (after.accumulation > stages) == (before.accumulation > stages)
    assert (after.micro > 1) == (before.micro > 1)
    if shrunk.changes:
        assert count_parameters(big) > SMALL_PARAMETERS or before.global_batch * big.sequence > SMALL_TOKENS
        assert all(change.before != change.after for change in shrunk.changes)
    assert shrink(shrunk.config, layout).config == shrunk.config
    assert Config.model_validate(shrunk.config.plain()) == shrunk.config


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_quick_to_verify(name: str) -> None:
    tensor = 5 if name == "gpt2-xl" else 4
    sequence = ["parallel.sequence=false"] if name == "gpt2-xl" else []
    config, layout, shrunk = _shrunk(
        f"model.preset={name}", f"parallel.tensor={tensor}", "parallel.pipeline=2", *sequence
    )
    small = transformer_config(shrunk.config)
    assert count_parameters(small) < 600_000
    if shrunk == Shrunk(config):
        assert name.startswith("tiny-")
        return
    assert batch_plan(shrunk.config, layout).global_batch * small.sequence <= 512


def test_schedules_keep_the_micro_batches_they_need() -> None:
    for name, before, after in (
        ("dualpipe-v", 60, 8),
        ("interleaved", 61, 9),
        ("zb-h1", 3, 3),
        ("1f1b", 61, 5),
    ):
        _, layout, shrunk = _shrunk(
            "model.preset=gpt2-xl", "parallel.pipeline=4", f"parallel.schedule={name}", "parallel.sequence=false",
            f"batch.global={before}", "batch.micro=1",
        )  # fmt: skip
        assert batch_plan(shrunk.config, layout).accumulation == after, name
        check_fit(shrunk.config, layout, transformer_config(shrunk.config))
