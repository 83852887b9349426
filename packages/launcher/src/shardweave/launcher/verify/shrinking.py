"""A large configuration made small, so that what can go wrong with its layout still goes wrong.

Mistakes of a layout hide in remainders: a vocabulary that does not divide, a last stage with one block more, fewer
key heads than ranks. So each size is replaced by the smallest one that relates to the layout in the same way: the
same remainder, the same order (fewer, as many, more), the same family. What is not a size stays as it is: the
layout itself, norms, positions, dropout, ties, optimizer, schedule, ZeRO.

    layers     same remainder over the stages           heads      multiple of the ranks; kv_heads shared likewise
    vocab      same remainder over the ranks            hidden     heads of width 8 (9 where the width is odd, more
                                                                   where rotary turns a part that is no pair of these)
    ffn        divides over the ranks, or does not      sequence   same remainder over the ranks, odd stays odd
    experts    one or more on each of the ranks of ep, of which a token visits one, some or all
    batch      one micro-batch, as many as stages or more than stages, as before; where a schedule deals with groups of
               them or needs many, the same remainder over the ranks, and twice as many or more
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from shardweave.launcher.config import Config, RecomputeEvery
from shardweave.launcher.layout import Layout, batch_plan, schedule_of, stages_per_rank
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.strict_yaml import Path, path_text
from shardweave.launcher.words import tokenizer_of
from shardweave.models import TransformerConfig, count_parameters

__all__ = ["Change", "Shrunk", "in_float64", "shrink", "uncompressed"]

SMALL_PARAMETERS = 1_000_000
SMALL_TOKENS = 4096
"""A configuration within both, parameters and tokens a step, is verified as it is: it takes seconds anyway."""

_HEAD_WIDTH = 8
_SEQUENCE = 16
_PLAIN = ("gpipe", "1f1b")
"""Schedules that ask only whether there are more micro-batches than stages."""


@dataclass(frozen=True)
class Change:
    """One setting that verification does not take from the configuration."""

    path: Path
    before: Any
    after: Any
    reason: str
    """What stayed the same, or why it had to change."""

    def __str__(self) -> str:
        return f"{path_text(self.path)} {self.before} -> {self.after} ({self.reason})"


@dataclass(frozen=True)
class Shrunk:
    """A configuration to verify, and how it differs from the one that was asked about."""

    config: Config
    changes: tuple[Change, ...] = ()


def shrink(config: Config, layout: Layout) -> Shrunk:
    """`config` made small for `layout`, or as it is when it is small already.

    The configuration fits the layout (`check_fit`, `batch_plan`); so does the result.
    """
    shape, plan = transformer_config(config), batch_plan(config, layout)
    if count_parameters(shape) <= SMALL_PARAMETERS and plan.global_batch * shape.sequence <= SMALL_TOKENS:
        return Shrunk(config)
    changes = [change for change in (*_model(config, layout, shape), *_batch(config, layout)) if change]
    return Shrunk(_applied(config, changes), tuple(changes))


def in_float64(shrunk: Shrunk) -> Shrunk:
    """The same computed in float64, where two orders of a sum differ by 1e-16 and a mistake does not."""
    plain = shrunk.config.plain()
    wanted: list[tuple[Path, str]] = [(("precision",), "fp64")]
    wanted += [(("zero", key), "auto") for key in ("gradient_dtype", "reduce_dtype")]
    changes = []
    for path, after in wanted:
        before = _at(plain, path)
        if before != after:
            changes.append(Change(path, before, after, "rounding must not hide a mistake"))
    return Shrunk(_applied(shrunk.config, changes), (*shrunk.changes, *changes))


def uncompressed(shrunk: Shrunk) -> Shrunk:
    """The same with gradients that travel whole: in any precision, compressed ones are not those of one process."""
    before = shrunk.config.comm.compression
    if before == "none":
        return shrunk
    change = Change(("comm", "compression"), before, "none", "what is not sent must not hide a mistake")
    return Shrunk(_applied(shrunk.config, [change]), (*shrunk.changes, change))


def _model(config: Config, layout: Layout, shape: TransformerConfig) -> Iterator[Change | None]:
    ranks = layout.tensor
    stages = layout.pipeline * stages_per_rank(config, layout)
    layers = _layers(shape.layers, stages)
    if config.model.weights is not None:
        yield Change(("model", "weights"), config.model.weights, None, "files hold the full size")
    yield _change(config, "layers", shape.layers, layers, f"the same remainder over {_stages(stages)}")
    exchanged = layout.context if config.parallel.context_form == "all-to-all" else 1
    if isinstance(config.recompute, RecomputeEvery) and config.recompute.every > layers:
        before = {"every": config.recompute.every}
        yield Change(("recompute",), before, {"every": layers}, "one block at least")
    heads, kv_heads = _heads(shape, ranks, exchanged)
    width = _width(shape)
    hidden = heads * width
    if shape.query_size != shape.hidden:  # as wide, wider or less wide than all heads, as before
        hidden = min(shape.hidden, hidden + (width if shape.query_size < shape.hidden else -(width // 2)))
    yield _change(config, "hidden", shape.hidden, hidden, f"{heads} heads of width {width}")
    if config.model.head_dim is not None:
        yield _change(config, "head_dim", shape.head_size, width, "less, and as odd or even")
    yield _change(config, "heads", shape.heads, heads, f"shared by {_ranks(ranks)} in the same way")
    if config.model.kv_heads is not None:
        reason = f"to query heads and {_ranks(ranks)} as before"
        yield _change(config, "kv_heads", shape.num_kv_heads, kv_heads, reason)
    yield _ffn(config, shape, hidden, ranks)
    if shape.experts:
        experts, visited = _experts(shape, layout.expert)
        yield _change(config, "experts", shape.experts, experts, _spread(layout.expert))
        reason = "one, some or all of them, as before"
        yield _change(config, "experts_per_token", shape.experts_per_token, visited, reason)
    least = tokenizer_of(config).vocab  # the text stays
    vocab = least + (shape.vocab - least) % ranks
    yield _change(config, "vocab", shape.vocab, vocab, f"the same remainder over {_ranks(ranks)}")
    context = layout.context
    sequence = _same_remainder(shape.sequence, lcm(ranks * context, 2 * context), _SEQUENCE)
    over = _ranks(ranks) if context == 1 else f"{_ranks(ranks)} and {context} context ranks"
    yield _change(config, "sequence", shape.sequence, sequence, f"the same remainder over {over}")


def _batch(config: Config, layout: Layout) -> Iterator[Change | None]:
    plan, ranks = batch_plan(config, layout), layout.pipeline
    micro = min(plan.micro, 2)
    if schedule_of(config, layout) in _PLAIN:
        accumulation = min(plan.accumulation, ranks + 1)
    else:
        accumulation = _same_remainder(plan.accumulation, ranks, 2 * ranks)
    total = micro * accumulation * layout.data
    if micro != plan.micro:
        yield Change(("batch", "micro"), plan.micro, micro, "more than one sequence at once")
    if total != plan.global_batch:
        reason = f"{micro} micro × {accumulation} accumulation × {layout.data} data"
        yield Change(("batch", "global"), plan.global_batch, total, reason)


def _layers(layers: int, stages: int) -> int:
    """At least one block a stage and two in all, with the same remainder."""
    return _same_remainder(layers, stages, max(stages, 2))


def _same_remainder(number: int, divisor: int, least: int) -> int:
    """The smallest number from `least` on, but not above `number`, with its remainder."""
    return min(number, least + (number - least) % divisor)


def _heads(shape: TransformerConfig, ranks: int, exchanged: int) -> tuple[int, int]:
    """The smallest numbers of query and of key and value heads that share the ranks in the same way.

    `exchanged`: the context ranks that deal out the heads of a tensor rank among them, if they do.
    """
    wanted = _sharing(shape.heads, shape.num_kv_heads, ranks, exchanged)
    for heads in range(ranks * exchanged, shape.heads + 1, ranks * exchanged):
        for kv_heads in range(1, heads + 1):
            if heads % kv_heads == 0 and _sharing(heads, kv_heads, ranks, exchanged) == wanted:
                return heads, kv_heads
    return shape.heads, shape.num_kv_heads


def _sharing(heads: int, kv_heads: int, ranks: int, exchanged: int) -> tuple[object, ...]:
    """All that a layer's code asks about its heads."""
    return (
        heads == ranks,
        heads & (heads - 1) == 0,  # a power of two: ALiBi's slopes follow another rule otherwise
        kv_heads == 1,
        kv_heads == heads,
        kv_heads % ranks == 0,
        kv_heads == ranks,
        kv_heads if kv_heads < ranks else 0,  # each is copied over ranks / kv_heads ranks
        max(kv_heads // ranks, 1) % exchanged == 0,  # or each goes to several of the ranks that exchange
    )


def _width(shape: TransformerConfig) -> int:
    """Of a head: small, as odd or even as before, and so that the part of it that rotary turns is pairs."""
    for width in range(_HEAD_WIDTH + shape.head_size % 2, shape.head_size, 2):
        turned = int(width * shape.rotary_fraction)
        if turned >= 2 and turned % 2 == 0:
            return width
        if shape.position != "rotary":
            return width
    return shape.head_size


def _experts(shape: TransformerConfig, ranks: int) -> tuple[int, int]:
    """The smallest numbers of experts, four or more if there are, and of those that a token visits."""
    own, total = shape.experts // ranks, shape.experts
    least = max(min(own, 2) * ranks, min(total, 4))
    experts = next(size for size in range(ranks, total + 1, ranks) if size >= least)
    if shape.experts_per_token == total:
        return experts, experts
    return experts, min(shape.experts_per_token, 2)


def _ffn(config: Config, shape: TransformerConfig, hidden: int, ranks: int) -> Change | None:
    """The family's rule where that was meant and still divides alike, else as many times the width as before, which
    for experts, as there are several, is once at most."""
    before, remainder = shape.ffn_size, shape.ffn_size % ranks
    after = max(1, before * hidden // shape.hidden)
    if shape.experts:
        after = max(ranks, min(after, hidden))
    elif config.model.ffn is None:
        after = _ffn_by_rule(config, hidden)
        if after % ranks == remainder:
            return None
    after = min(before, after + (remainder - after) % ranks)
    after = after if after >= ranks else before
    return _change(config, "ffn", before, after, f"the same remainder over {_ranks(ranks)}")


def _ffn_by_rule(config: Config, hidden: int) -> int:
    model = config.model.model_copy(
        update={"hidden": hidden, "heads": 1, "kv_heads": None, "head_dim": None, "position": "alibi"}
    )
    return transformer_config(config.model_copy(update={"model": model})).ffn_size


def _change(config: Config, key: str, before: int, after: int, reason: str) -> Change | None:
    if after == before:
        return None
    written = getattr(config.model, key)
    return Change(("model", key), before if written is None else written, after, reason)


def _applied(config: Config, changes: list[Change]) -> Config:
    plain: Any = config.plain()
    for change in changes:
        block = plain
        for part in change.path[:-1]:
            block = block[part]
        block[change.path[-1]] = change.after
    return Config.model_validate(plain)


def _at(plain: Any, path: Path) -> Any:
    for part in path:
        plain = plain[part]
    return plain


def _ranks(tensor: int) -> str:
    return f"{tensor} tensor rank" + ("s" if tensor > 1 else "")


def _spread(ranks: int) -> str:
    return "a few" if ranks == 1 else f"spread over {ranks} ranks in the same way"


def _stages(number: int) -> str:
    return f"{number} stage" + ("s" if number > 1 else "")
