"""Arithmetic of layouts and batches, and what does not fit."""

from __future__ import annotations

import pytest

from shardweave.comm import mesh_ranks
from shardweave.launcher.layout import BatchPlan, Layout, batch_plan, check_fit, layout_of
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.staging import Staging, staging_of
from shardweave.pipeline import RULES


def _layout(*overrides: str, world: int | None = None) -> Layout:
    return layout_of(load_config(None, overrides), world)


def _plan(total: int, micro: int, data: int) -> BatchPlan:
    config = load_config(None, [f"batch.global={total}", f"batch.micro={micro}"])
    return batch_plan(config, Layout(data=data))


def test_the_grid_is_the_meshs() -> None:
    layout = Layout(data=3, tensor=2, pipeline=2)
    assert layout.world_size == 12
    shape = {"pp": 2, "dp": 3, "cp": 1, "tp": 2}
    for rank in range(12):
        coordinates = layout.coordinates(rank)
        assert layout.rank(**coordinates) == rank
        for axis in ("pp", "dp", "tp"):
            members = mesh_ranks(shape, (axis,), rank)
            assert members[coordinates[axis]] == rank
    assert layout.coordinates(7) == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}
    assert str(layout) == "dp3 × tp2 × pp2"


def test_data_auto_is_what_the_ranks_leave_over() -> None:
    assert _layout().world_size == 1
    assert _layout("parallel.tensor=2").world_size == 2
    assert _layout("parallel.tensor=2", "parallel.pipeline=2", world=8).data == 2
    assert _layout("parallel.data=2", world=2) == Layout(data=2)


@pytest.mark.parametrize(
    ("overrides", "world", "text"),
    [
        (
            ["parallel.tensor=2"],
            5,
            "5 ranks were started, which is not a multiple of 2 (parallel.tensor: 2 × ",
        ),
        (
            ["parallel.tensor=2", "parallel.data=2"],
            3,
            "the layout needs 4 ranks (parallel.data: 2 × parallel.tensor: 2",
        ),
        (["parallel.tensor=2", "parallel.data=2"], 8, "start 4, or use parallel.data=4 or auto"),
    ],
)
def test_ranks_that_do_not_match(overrides: list[str], world: int, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        _layout(*overrides, world=world)
    assert text in str(error.value)


def test_b117_a_batch_that_does_not_divide_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        _plan(10, 4, 2)
    assert str(error.value) == (
        "`batch.global: 10` is not a multiple of `batch.micro: 4` × 2 data ranks = 8 (global = micro × accumulation "
        "× data); use batch.global=8 or batch.global=16, or batch.micro=1 or 5"
    )
    with pytest.raises(
        ConfigError, match=r"`batch.global: 8` is not a multiple .* = 16 .* use batch.global=16, or"
    ):
        _plan(8, 4, 4)


def test_more_micro_batches_than_a_schedule_lists_are_refused() -> None:
    assert _plan(10_000, 1, 1).accumulation == 10_000
    with pytest.raises(
        ConfigError, match="is 100000 micro-batches a step on each of 10 data ranks, and 10000 are"
    ):
        _plan(1_000_000, 1, 10)


def test_b117_the_third_number_follows() -> None:
    plan = _plan(8, 2, 2)
    assert plan.accumulation == 2
    assert str(plan) == "8 sequences = 2 micro × 2 accumulation × 2 data"
    assert _plan(8, 4, 2).accumulation == 1


def _misfit(*overrides: str) -> str:
    config = load_config(None, overrides)
    with pytest.raises(ConfigError) as error:
        check_fit(config, layout_of(config), transformer_config(config))
    return str(error.value)


def test_tensor_ranks_must_divide_the_heads() -> None:
    text = _misfit("model.heads=8", "parallel.tensor=3", "model.sequence=120")
    assert text == "`parallel.tensor: 3` does not divide `model.heads: 8`; use 1, 2, 4 or 8"


def test_key_value_heads_and_tensor_ranks_divide_one_way_or_the_other() -> None:
    text = _misfit("model.heads=12", "model.hidden=120", "model.kv_heads=6", "parallel.tensor=4")
    assert (
        text == "`parallel.tensor: 4` and `model.kv_heads: 6` do not divide each other; use 1, 2, 3, 6 or 12"
    )
    for tensor in (1, 2, 4, 8):
        config = load_config(None, ["model.heads=8", "model.kv_heads=2", f"parallel.tensor={tensor}"])
        check_fit(config, layout_of(config), transformer_config(config))


def test_other_misfits() -> None:
    text = _misfit("model.sequence=127", "parallel.tensor=2")
    assert "`parallel.tensor: 2` does not divide `model.sequence: 127`" in text
    assert "use parallel.sequence=false" in text
    pieces = "is more than the 6 pieces of the model (embedding, `model.layers: 4`, head): "
    pieces += "some stages would have nothing"
    assert (
        _misfit("parallel.pipeline=7")
        == f"`parallel.pipeline: 7` {pieces}; use at most parallel.pipeline=6, or more layers"
    )
    assert (
        _misfit("parallel.pipeline=4", "parallel.schedule=interleaved", "parallel.chunks=2")
        == f"`parallel.pipeline: 4` × `parallel.chunks: 2` (`parallel.schedule: interleaved`) = 8 stages {pieces}; use "
        "at most parallel.pipeline=3 or parallel.chunks=1, or more layers"
    )
    assert (
        _misfit("parallel.pipeline=4", "parallel.schedule=zb-v")
        == f"`parallel.pipeline: 4` × 2 stages per rank (`parallel.schedule: zb-v`) = 8 stages {pieces}; use at most "
        "parallel.pipeline=3 or parallel.schedule=1f1b, or more layers"
    )
    assert "`model.ffn: 2`" in _misfit("model.ffn=2", "parallel.tensor=4")
    both = _misfit("parallel.tensor=3", "parallel.pipeline=9")
    assert len(both.splitlines()) == 2  # heads and layers at once


def test_chunks_need_a_schedule_that_has_some() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert _misfit("parallel.pipeline=2", f"parallel.schedule={name}", "parallel.chunks=2") == (
            f"`parallel.chunks: 2` has no effect because `parallel.schedule: {name}` runs one stage per rank; use "
            "parallel.chunks=1, parallel.schedule=interleaved or parallel.schedule=breadth-first"
        )


def test_dualpipe_v_needs_twice_as_many_micro_batches_as_ranks() -> None:
    def planned(*overrides: str) -> int:
        config = load_config(
            None, ["parallel.pipeline=2", "parallel.schedule=dualpipe-v", "batch.global=12", *overrides]
        )
        return batch_plan(config, layout_of(config)).accumulation

    assert planned("batch.micro=3") == 4
    with pytest.raises(
        ConfigError,
        match=r"`parallel.schedule: dualpipe-v` needs 4 micro-batches a step \(twice as many as ranks\) with "
        r"`parallel.pipeline: 2`, and there are 3 \(`batch.global: 12` / `batch.micro: 4` / 1 data ranks\); use "
        r"batch.micro=1, 2 or 3, or parallel.schedule=zb-v",
    ):
        planned("batch.micro=4")
    with pytest.raises(
        ConfigError, match=r"and there are 3 .*; use batch.global=16, or parallel.schedule=zb-v"
    ):
        planned("batch.micro=1", "parallel.data=4")
    assert planned("batch.micro=12", "parallel.pipeline=1") == 1  # where a schedule has no effect


def test_where_stages_are() -> None:
    def staging(*overrides: str) -> Staging:
        config = load_config(None, ["model.layers=6", *overrides])
        layout, shape = layout_of(config), transformer_config(config)
        check_fit(config, layout, shape)
        return staging_of(config, layout, shape)

    looped = staging("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=3")
    assert looped.rank_of_stage == (0, 1, 0, 1, 0, 1)
    assert looped.stages_of(1) == (1, 3, 5)
    assert [layer for part in looped.parts for layer in part.layers] == [0, 1, 2, 3, 4, 5]
    for chunks in (1, 2, 3):  # what is said of a V's is not asked for
        vee = staging("parallel.pipeline=3", "parallel.schedule=v-min", f"parallel.chunks={chunks}")
        assert vee.rank_of_stage == (0, 1, 2, 2, 1, 0)
        first, last = vee.parts_of(0)
        assert (first.embedding, first.head, last.embedding, last.head) == (True, False, False, True)
    for name, rule in RULES.items():
        plan = staging("parallel.pipeline=2", f"parallel.schedule={name}")
        assert plan.plan(rule.least(2)).rank_of_stage == plan.rank_of_stage
    alone = staging("parallel.schedule=zb-v")
    assert (alone.schedule, alone.rank_of_stage) == ("1f1b", (0,))


def test_b033_context_ranks_take_a_piece_from_both_ends() -> None:
    text = _misfit("parallel.context=4", "model.sequence=12")
    assert text == (
        "twice `parallel.context: 4` does not divide `model.sequence: 12`: each rank takes a piece from both ends; "
        "use 1, 2, 3 or 6, or another model.sequence"
    )
    text = _misfit("parallel.context=4", "parallel.tensor=4", "model.sequence=24", "model.heads=8")
    assert (
        "`parallel.context: 4` leaves 6 of `model.sequence: 24` to a rank, which `parallel.sequence: true`"
        in text
    )
    assert text.endswith("does not divide over 4 tensor ranks; use 1, 2, 3 or 6, or parallel.sequence=false")
    config = load_config(None, ["parallel.context=4", "parallel.tensor=2", "model.sequence=24"])
    check_fit(config, layout_of(config), transformer_config(config))


def test_heads_that_are_exchanged_for_tokens_divide_over_context_ranks() -> None:
    exchanged = ("model.heads=8", "parallel.context_form=all-to-all", "model.sequence=48")
    text = _misfit(*exchanged, "parallel.tensor=4", "parallel.context=4")
    assert text == (
        "`parallel.context_form: all-to-all` gives each of 4 context ranks some of the 2 heads of a tensor rank "
        "(`model.heads` / `parallel.tensor`), which do not divide; use parallel.context=1 or 2, or "
        "parallel.context_form=ring"
    )
    config = load_config(None, [*exchanged, "parallel.tensor=2", "parallel.context=4"])
    check_fit(config, layout_of(config), transformer_config(config))


def test_experts_are_spread_among_data_ranks() -> None:
    experts = ("model.experts=8", "parallel.expert=4")
    layout = _layout(*experts, "parallel.tensor=2")
    assert layout == Layout(data=4, expert=4, tensor=2)  # as many data ranks as the layout names
    assert _layout(*experts, world=8) == Layout(data=8, expert=4)
    assert _layout("parallel.expert=4") == Layout()  # without experts it has no effect, as it says
    assert str(layout) == "dp4 (ep4) × tp2 × pp1"
    assert (layout.world_size, layout.sizes()["ep"]) == (8, 4)
    assert layout.coordinates(5) == {"pp": 0, "dp": 2, "ep": 2, "cp": 0, "tp": 1}
    assert Layout(data=8, expert=2).coordinates(5)["ep"] == 1
    text = _misfit(*experts, "parallel.data=6")
    assert text == (
        "`parallel.expert: 4` does not divide the 6 data ranks (`parallel.data`), among which experts are spread; "
        "use 1 or 2, or parallel.data=12"
    )
    text = _misfit(*experts, "parallel.data=4", "zero.replicas=2")
    assert "does not divide the 2 data ranks (`parallel.data` / `zero.replicas: 2`)" in text
    assert text.endswith("use 1 or 2, or parallel.data=8")
    text = _misfit("model.experts=4", "parallel.expert=3", "parallel.data=2")
    assert text.endswith("use 1 or 2")
    text = _misfit("model.experts=6", "parallel.expert=4")
    assert text == (
        "`parallel.expert: 4` does not divide `model.experts: 6`: every rank has equally many; use 1, 2, 3 or 6, or "
        "another model.experts"
    )
    assert "use 1 or 2, or another" in _misfit("model.experts=6", "parallel.expert=4", "parallel.data=4")


def test_the_transformers_own_rules_name_the_launchers_keys() -> None:
    with pytest.raises(ConfigError, match=r"model\.experts_per_token: 3"):
        load_config(None, ["model.experts=2", "model.experts_per_token=3"])
    shape = transformer_config(
        load_config(None, ["model.experts=4", "model.z_loss=0.5", "model.router_bias=0.1"])
    )
    assert (shape.router_z_loss, shape.router_bias, shape.balance_loss) == (0.5, True, 0.01)
    with pytest.raises(
        ConfigError, match=r"model\.rotary_fraction: 0\.3 of a head of 32 is 9, which must be even"
    ):
        load_config(None, ["model.position=rotary", "model.rotary_fraction=0.3"])
    with pytest.raises(ConfigError, match=r"model\.rotary_scaling\.original: None must be a whole number"):
        load_config(None, ["model.position=rotary", "model.rotary_scaling={kind: llama3, factor: 2}"])
    with pytest.raises(
        ConfigError, match=r"model\.hidden: 512 in place of llama-3-8b's 4096, and its ffn of 14336"
    ):
        load_config(None, ["model.preset=llama-3-8b", "model.hidden=512"])
    assert (
        load_config(None, ["model.preset=llama-3-8b", "model.hidden=512", "model.ffn=null"]).model.ffn is None
    )
    assert (
        transformer_config(
            load_config(None, ["model.hidden=100", "model.heads=3", "model.head_dim=8"])
        ).query_size
        == 24
    )
    dense = transformer_config(load_config(None, ["model.z_loss=0.5", "model.expert_capacity=1"]))
    assert (dense.router_z_loss, dense.expert_capacity) == (0.0, None)


def test_uneven_vocabulary_width_and_layers_fit() -> None:
    config = load_config(
        None,
        ["model.vocab=257", "model.ffn=513", "model.layers=5", "parallel.tensor=2", "parallel.pipeline=4"],
    )
    layout, shape = layout_of(config), transformer_config(config)
    check_fit(config, layout, shape)
    stages = staging_of(config, layout, shape).parts
    assert [layer for stage in stages for layer in stage.layers] == [0, 1, 2, 3, 4]
    assert [stage.embedding for stage in stages] == [True, False, False, False]
    assert [stage.head for stage in stages] == [False, False, False, True]


def test_a_stage_with_a_chunked_head_has_fewer_blocks() -> None:
    """A head of a block's cost, which then counts a third more."""
    wide = ["model.vocab=1000", "model.hidden=64", "model.layers=6", "parallel.pipeline=2"]
    for chunked, blocks in ((False, [3, 3]), (True, [4, 2])):
        config = load_config(None, [*wide, f"batch.chunked_loss={str(chunked).lower()}"])
        parts = staging_of(config, layout_of(config), transformer_config(config)).parts
        assert [len(part.layers) for part in parts] == blocks
