"""The lattice's one table: every option of a run with the values that are tried. A new feature joins with a row.

Two kinds of rows. *Layout* options may change whenever a run is resumed, and nothing but speed and memory may change
with them. *Run* options say what is trained, so a chain of points keeps them.

A row is an option's name, the key it sets and its values; where a value is more than one key's, `_choice` names what
each value sets. If some combinations make no sense, a rule says which do: a function whose parameters are called
like options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.lattice.covering import Point, Rule, Space

from shardweave.launcher.layout import layout_of
from shardweave.launcher.reading import load_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.staging import staging_of
from shardweave.pipeline import BUILDERS
from shardweave.pipeline import RULES as NUMBERS

__all__ = [
    "EXACT", "LINES", "LIVE", "OPTIONS", "RULES", "STEPS", "Option",
    "layout_options", "num_ranks", "run_options", "settings", "space",
]  # fmt: skip

STEPS = 5
"""Steps that a point trains."""

SAMPLES = 24
"""Samples of a step: so many are dealt out over 1, 2, 3, 4 or 8 data ranks."""

HEADS = 24
"""Query heads: so many are dealt out over 1, 2, 3, 4 or 8 tensor ranks."""

LIVE = 52_000
"""Parameters gathered at once, at most: the largest block with an embedding that is the head, and no block more."""

LINES = "lines.jsonl"
"""A corpus of a few samples, in the lattice's folder: its epochs are shorter than a stretch of five steps."""

LENGTH = 24
"""Tokens of a sample: so many are dealt out over 1, 2 or 4 context ranks, a piece from each end."""

SCHEDULES = sorted(BUILDERS, key=lambda name: name != "1f1b")
"""That of one rank first, where no other has an effect."""

BASE: Mapping[str, Any] = {
    "model.hidden": 2 * HEADS,
    "model.heads": HEADS,
    "model.sequence": LENGTH,
    "batch.global": SAMPLES,
    "optimizer.warmup": 3,
    "guard.spike": "off",
    "metrics.statistics": STEPS,
}
"""What all points share: the smallest model that every layout of the table can split. The last step of each tells what
gradients and activations look like."""

EXACT = "fp64"
"""The number format in which a layout has to agree to the last digits, so that every combination is tried in it."""


@dataclass(frozen=True)
class Option:
    """One option, and what each of its values sets in the configuration."""

    name: str
    values: Mapping[Any, Mapping[str, Any]]
    is_layout: bool


def _layout(name: str, key: str | None, *values: Any) -> Option:
    return Option(name, {value: {key: value} if key else {} for value in values}, is_layout=True)


def _run(name: str, key: str, *values: Any) -> Option:
    return Option(name, {value: {key: value} for value in values}, is_layout=False)


def _choice(name: str, **values: Mapping[str, Any]) -> Option:
    return Option(name, values, is_layout=False)


OPTIONS: tuple[Option, ...] = (
    _layout("data", "parallel.data", 1, 2, 3, 4, 8),
    _layout("tensor", "parallel.tensor", 1, 2, 3, 4, 8),
    _layout("pipeline", "parallel.pipeline", 1, 2, 3, 4, 8),
    _layout("context", "parallel.context", 1, 2, 4),
    _layout("form", "parallel.context_form", "ring", "all-to-all"),
    _layout("expert", "parallel.expert", 1, 2, 4),
    _layout("sequence", "parallel.sequence", False, True),
    Option(
        "inputs",  # of products under sequence parallelism
        {"again": {}, "kept": {"parallel.keep_inputs": True}, "pieces": {"parallel.decomposed": True}},
        is_layout=True,
    ),
    _layout("chunked_loss", "batch.chunked_loss", False, True),
    _layout("schedule", "parallel.schedule", *SCHEDULES),
    _layout("chunks", "parallel.chunks", 1, 2, 3),
    _layout("stage", "zero.stage", 0, 1, 2, 3),
    _layout("between", "zero.shard_between_micro_batches", "auto", True, False),
    _layout("prefetch", "zero.prefetch", "auto", 0, 3),
    _layout("live", "zero.max_live_parameters", "auto", LIVE),
    _layout("kept", "zero.keep_gathered", "auto", 30_000),  # a block or two
    _layout(
        "accumulation", None, 1, 2, 3, 4
    ),  # micro-batches of a data rank: `settings` makes batch.micro of it
    _layout("bucket", "comm.bucket_mb", 25, 0.01),  # 0.01: nearly every matrix is a unit of its own
    _layout("replicas", "zero.replicas", 1, 2),
    _layout("nodes", None, 1, 2, 4),  # which the mesh is told of: equally many ranks on each
    _layout("hierarchy", "comm.hierarchy", "auto", "flat", "two-level"),
    _layout("memory", "comm.shared_memory", True, False),
    _layout("debug", "comm.debug", False, True),
    _layout("workers", "data.workers", 1, 0, 3),
    Option(
        "recompute",
        {
            "none": {},
            "selective": {"recompute": "selective"},
            "full": {"recompute": "full"},
            "every_two": {"recompute": {"every": 2}},
            "operations": {"recompute": {"operations": ["attention", "norm"]}},
        },
        is_layout=True,
    ),
    _run("layers", "model.layers", 3, 5, 8),  # and the two ends: uneven over most numbers of stages
    _run(
        "kv_heads", "model.kv_heads", HEADS, 4, 1
    ),  # 4 are split over 2 and 4 tensor ranks and copied over 8
    _run("ffn", "model.ffn", 192, 101),  # 101 is divided by no number of ranks
    _run("vocab", "model.vocab", 264, 259),
    _run("position", "model.position", "learned", "rotary", "alibi"),
    _run("norm", "model.norm", "layernorm", "rmsnorm"),
    _run("embedding_norm", "model.embedding_norm", False, True),
    _run("qk_norm", "model.qk_norm", False, True),
    _run("activation", "model.activation", "gelu", "gelu_tanh", "swiglu", "relu"),
    _run("parallel_residual", "model.parallel_residual", False, True),
    _choice(
        "biases",
        all={"model.bias": True},
        none={"model.bias": False},
        attention={"model.attention_bias": True, "model.mlp_bias": False},
        mlp={"model.attention_bias": False, "model.mlp_bias": True},
    ),
    _run("head_z_loss", "model.head_z_loss", 0.0, 0.01),
    _choice(
        "experts",
        none={},
        four={"model.experts": 4, "model.z_loss": 0.01, "model.router_bias": 0.01},
        eight_with_room={
            "model.experts": 8,
            "model.experts_per_token": 1,
            "model.expert_capacity": 1.0,
            "model.balance_loss": 0.1,
        },
    ),
    _run("tied", "model.tie_embeddings", True, False),
    _run("dropout", "model.dropout", 0.0, 0.1),
    _run("attention_dropout", "model.attention_dropout", 0.0, 0.1),
    _choice(
        "optimizer",
        adamw={},
        adam={"optimizer.name": "adam"},
        sgd={"optimizer.name": "sgd", "optimizer.lr": 0.1},
    ),
    _run("decay", "optimizer.weight_decay", 0.1, 0.0),
    _run("clip", "optimizer.clip", 1.0, 0.01, None),
    _run("rate", "optimizer.schedule", "cosine", "linear", "constant"),
    _choice(
        "text",
        builtin={},
        lines={"data.source": LINES},
        blend={"data.source": [{"source": LINES, "weight": 0.7}, {"source": "builtin", "weight": 0.3}]},
    ),
    _run("documents_apart", "data.separate_documents", False, True),
    _choice(
        "numbers",
        fp64={"precision": "fp64"},
        fp32={"precision": "fp32"},
        fp32_sums_fp64={"precision": "fp32", "zero.gradient_dtype": "fp64"},
        # Everything is sent, as float32, the first step plain: with residuals that stay zero.
        fp32_topk={
            "precision": "fp32",
            "comm.compression": "topk",
            "comm.density": 1.0,
            "comm.warmup": 1,
        },
        bf16={"precision": "bf16"},
        bf16_wire_bf16={"precision": "bf16", "zero.reduce_dtype": "bf16"},
        fp16={"precision": "fp16"},
    ),
)


def _at_most_eight_ranks(data: int, tensor: int, pipeline: int, context: int) -> bool:
    return data * tensor * pipeline * context <= 8


def _context_ranks_leave_tensor_ranks_equal_parts(context: int, tensor: int, sequence: bool) -> bool:
    return not sequence or LENGTH // context % tensor == 0


def _heads_are_exchanged_over_context_ranks(form: str, context: int, tensor: int) -> bool:
    return form == "ring" or (context > 1 and HEADS // tensor % context == 0)


def _experts_are_spread_over_data_ranks(
    expert: int, experts: str, data: int, replicas: int, numbers: str
) -> bool:
    """Of a copy of shards; and without compression, which is for one axis."""
    spread = experts != "none" and data % (replicas * expert) == 0 and numbers != "fp32_topk"
    return expert == 1 or spread


def _experts_are_chosen_alike(experts: str, numbers: str) -> bool:
    """Rounding makes a token choose another expert, and that another run: only in float64 it is the same."""
    return experts == "none" or numbers == EXACT


def _experts_have_no_bias(experts: str, biases: str) -> bool:
    return experts == "none" or biases != "mlp"


def _rounding_is_tried_with_norms_that_have_a_slope(qk_norm: bool, norm: str, numbers: str) -> bool:
    """A head has two numbers, and less their mean these are a sign: what comes through is noise but in float64."""
    return not (qk_norm and norm == "layernorm") or numbers == EXACT


def _a_sequence_is_shared_by_tensor_ranks(sequence: bool, tensor: int) -> bool:
    return tensor > 1 or not sequence


def _gathered_inputs_are_kept_or_come_in_pieces(inputs: str, sequence: bool) -> bool:
    return sequence or inputs == "again"


def _a_schedule_is_for_stages(schedule: str, pipeline: int) -> bool:
    return pipeline > 1 or schedule == "1f1b"


def _gradients_are_sharded_from_stage_two_on(between: object, stage: int) -> bool:
    return stage >= 2 or between == "auto"


def _are_gathered(stage: int, data: int, context: int, replicas: int) -> bool:
    """Whether there are parameters to gather: several ranks share those of a copy."""
    return stage == 3 and data * context > replicas


def _what_is_gathered_is_prefetched(
    prefetch: object, stage: int, data: int, context: int, replicas: int
) -> bool:
    return prefetch == "auto" or _are_gathered(stage, data, context, replicas)


@functools.cache
def _puts_weight_gradients_off(schedule: str) -> bool:
    """As the launcher has it, which then gathers all of a rank's stages."""
    config = load_config(None, ["parallel.pipeline=2", f"parallel.schedule={schedule}"])
    return staging_of(config, layout_of(config), transformer_config(config)).halves


def _what_is_gathered_is_bounded(
    live: object, stage: int, data: int, context: int, replicas: int, experts: str, schedule: str
) -> bool:
    """A block of experts is larger than the bound, and so are blocks whose weight gradients are put off."""
    fits = experts == "none" and not _puts_weight_gradients_off(schedule)
    return live == "auto" or (fits and _are_gathered(stage, data, context, replicas))


def _what_is_gathered_is_kept(kept: object, stage: int, data: int, context: int, replicas: int) -> bool:
    return kept == "auto" or _are_gathered(stage, data, context, replicas)


def _copies_are_of_shards(replicas: int, data: int, stage: int) -> bool:
    return replicas == 1 or (data % replicas == 0 and stage > 0)


def _nodes_have_equally_many_ranks(nodes: int, data: int, tensor: int, pipeline: int, context: int) -> bool:
    return data * tensor * pipeline * context % nodes == 0


def _levels_are_for_several_nodes(hierarchy: str, nodes: int) -> bool:
    return nodes > 1 or hierarchy == "auto"


def _two_levels_take_data_ranks_beside_each_other(
    hierarchy: str, nodes: int, data: int, tensor: int, pipeline: int, context: int
) -> bool:
    """Two or more of them on each of several nodes."""
    sharing = data * context
    inside, apart = divmod(sharing * tensor * pipeline // nodes, tensor)
    return hierarchy != "two-level" or (1 < inside < sharing and not apart and sharing % inside == 0)


def _gradients_are_compressed_once(numbers: str, between: object) -> bool:
    return numbers != "fp32_topk" or between is not True


def _micro_batches_are_equal(data: int, accumulation: int) -> bool:
    return SAMPLES % (data * accumulation) == 0


def _a_stage_has_a_piece(pipeline: int, layers: int, schedule: str, chunks: int) -> bool:
    """Of the blocks, the embedding and the head."""
    return pipeline * (NUMBERS[schedule].chunks or chunks) <= layers + 2


def _chunks_are_for_schedules_that_take_any(chunks: int, schedule: str) -> bool:
    return chunks == 1 or NUMBERS[schedule].chunks is None


def _stages_of_a_rank_are_interleaved(chunks: int, schedule: str) -> bool:
    return schedule != "interleaved" or chunks > 1


def _a_schedule_has_as_many_micro_batches_as_it_needs(
    schedule: str, pipeline: int, accumulation: int
) -> bool:
    return accumulation >= NUMBERS[schedule].least(pipeline)


def _key_heads_are_split_or_copied(tensor: int, kv_heads: int) -> bool:
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


def _rounding_is_tried_with_moments(numbers: str, optimizer: str) -> bool:
    return numbers == EXACT or optimizer == "adamw"


RULES: tuple[Rule, ...] = (
    _at_most_eight_ranks,
    _context_ranks_leave_tensor_ranks_equal_parts,
    _heads_are_exchanged_over_context_ranks,
    _experts_are_spread_over_data_ranks,
    _experts_are_chosen_alike,
    _experts_have_no_bias,
    _rounding_is_tried_with_norms_that_have_a_slope,
    _a_sequence_is_shared_by_tensor_ranks,
    _gathered_inputs_are_kept_or_come_in_pieces,
    _a_schedule_is_for_stages,
    _gradients_are_sharded_from_stage_two_on,
    _what_is_gathered_is_prefetched,
    _what_is_gathered_is_bounded,
    _what_is_gathered_is_kept,
    _copies_are_of_shards,
    _nodes_have_equally_many_ranks,
    _levels_are_for_several_nodes,
    _two_levels_take_data_ranks_beside_each_other,
    _gradients_are_compressed_once,
    _micro_batches_are_equal,
    _a_stage_has_a_piece,
    _chunks_are_for_schedules_that_take_any,
    _stages_of_a_rank_are_interleaved,
    _a_schedule_has_as_many_micro_batches_as_it_needs,
    _key_heads_are_split_or_copied,
    _rounding_is_tried_with_moments,
)
"""Which points make sense: layouts that fit the model, and no option that would have no effect."""


def space(options: Mapping[str, Sequence[Any]] | None = None) -> Space:
    """All points; or the partial points over some of the options."""
    chosen = layout_options() | run_options() if options is None else options
    return Space(chosen, [rule for rule in RULES if set(inspect.signature(rule).parameters) <= chosen.keys()])


def layout_options() -> dict[str, list[Any]]:
    """The options that may change from a point to the next, with their values."""
    return {option.name: list(option.values) for option in OPTIONS if option.is_layout}


def run_options() -> dict[str, list[Any]]:
    """The options that a chain of points keeps, with their values."""
    return {option.name: list(option.values) for option in OPTIONS if not option.is_layout}


def num_ranks(point: Point) -> int:
    """Ranks of a point's layout."""
    return int(point["data"] * point["tensor"] * point["pipeline"] * point["context"])


def settings(point: Point, folder: Path) -> dict[str, Any]:
    """A point as configuration overrides. `folder`: where the small corpus lies."""
    chosen = dict(BASE)
    for option in OPTIONS:
        chosen.update(option.values[point[option.name]])
    if point["qk_norm"] and point["norm"] == "layernorm":
        # Two numbers less their mean are a sign, whose slope is rounding: one process then parts from itself with other
        # micro-batches, by 5e-9 of the gradients' norm after ten steps in float64. With four it does by 1e-15.
        chosen["model.head_dim"] = 4
    chosen["batch.micro"] = SAMPLES // (point["data"] * point["accumulation"])
    if "data.source" in chosen:
        chosen["data.source"] = _found(chosen["data.source"], folder)
    return chosen


def _found(source: Any, folder: Path) -> Any:
    """A source whose small corpus lies in `folder`."""
    if isinstance(source, list):
        return [{**one, "source": _found(one["source"], folder)} for one in source]
    return str(folder / LINES) if source == LINES else source
