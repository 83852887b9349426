"""Rules between settings that hold for any number of ranks.

Two kinds. A *contradiction* ends the start: one of two settings must change. An *idle* setting is one that was
changed from its default and does nothing in this run; it is named with the reason, because a person who sets an
option expects an effect. A default is never idle, so a file that spells out every default is as quiet as an empty
one. Most idle settings are warnings, since one switches layouts without editing the rest of the file; those that
would change the model or its cost if they were obeyed are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardweave.launcher.config import Config, RecomputeEvery
from shardweave.launcher.problems import ConfigError, Problem, quoted
from shardweave.launcher.strict_yaml import Path, path_text
from shardweave.launcher.words import tokenizer_of

__all__ = ["contradictions", "idle"]


@dataclass(frozen=True)
class _Idle:
    """A setting, and why it does nothing in `config` (None: it does something)."""

    path: Path
    reason: Callable[[Config], str | None]


def _when(condition: Callable[[Config], bool], reason: str) -> Callable[[Config], str | None]:
    return lambda config: reason if condition(config) else None


_DENSE = _when(lambda config: config.model.experts == 0, "`model.experts` is 0: there are no experts")
_NOT_ROTARY = _when(lambda config: config.model.position != "rotary", "`model.position` is not rotary")
_ONE_STAGE = _when(
    lambda config: config.parallel.pipeline == 1, "`parallel.pipeline` is 1: there is one stage"
)
_WHOLE_GRADIENTS = _when(
    lambda config: config.zero.stage < 2, "`zero.stage` is below 2: every rank keeps whole gradients"
)
_WHOLE_PARAMETERS = _when(
    lambda config: config.zero.stage < 3, "`zero.stage` is below 3: every data rank keeps whole parameters"
)
_NOT_ADAM = _when(
    lambda config: config.optimizer.name == "sgd", "`optimizer.name` is sgd, which has no moments"
)
_CONSTANT = _when(lambda config: config.optimizer.schedule == "constant", "`optimizer.schedule` is constant")
_NO_TENSOR = _when(
    lambda config: config.parallel.tensor == 1, "`parallel.tensor` is 1: there is nothing to share"
)
_NO_CONTEXT = _when(
    lambda config: config.parallel.context == 1, "`parallel.context` is 1: every rank has whole sequences"
)
_PLAIN = _when(lambda config: config.comm.compression == "none", "`comm.compression` is none")
_NO_SHARDS = _when(
    lambda config: config.zero.stage == 0, "`zero.stage` is 0: every data rank keeps whole optimizer states"
)
_NO_VALIDATION = _when(
    lambda config: config.data.validation == 0 and config.data.validation_source is None,
    "`data.validation` is 0: there are no samples to evaluate on",
)
_OTHER_VALIDATION = _when(
    lambda config: config.data.validation_source is not None,
    "`data.validation_source` is evaluated on instead",
)
_NO_SAMPLES = _when(
    lambda config: config.run.sample_every == 0, "`run.sample_every` is 0: no text is asked for"
)
_NEVER_SKIPS = _when(lambda config: config.guard.nonfinite != "skip", "`guard.nonfinite` does not skip steps")
_NEVER_ROLLS_BACK = _when(
    lambda config: "rollback" not in (config.guard.nonfinite, config.guard.spike),
    "neither `guard.nonfinite` nor `guard.spike` is rollback",
)
_NEVER_SAVES = _when(lambda config: config.checkpoint.every == 0, "`checkpoint.every` is 0")


def _inputs_are_whole(config: Config) -> str | None:
    whole = None if config.parallel.sequence else "`parallel.sequence` is false: inputs are whole anyway"
    return _NO_TENSOR(config) or whole


def _stop_too_late(config: Config) -> str | None:
    late = config.run.stop_after is not None and config.run.stop_after >= config.run.steps
    return f"the run ends after `run.steps: {config.run.steps}` anyway" if late else None


def _not_kind(kind: str) -> Callable[[Config], str | None]:
    """Of settings that one kind of compression has."""
    return lambda config: (
        _PLAIN(config)
        or (f"`comm.compression` is {config.comm.compression}" if config.comm.compression != kind else None)
    )


def _plain_to_the_end(config: Config) -> str | None:
    plain = config.comm.compression != "none" and config.comm.warmup >= config.run.steps
    steps = f"`run.steps: {config.run.steps}` are all within `comm.warmup: {config.comm.warmup}`"
    return f"{steps} plain steps" if plain else None


_IDLE: tuple[_Idle, ...] = (
    _Idle(("run", "eval_every"), _NO_VALIDATION),
    _Idle(("run", "sample_prompt"), _NO_SAMPLES),
    _Idle(("run", "sample_tokens"), _NO_SAMPLES),
    _Idle(("run", "stop_after"), _stop_too_late),
    _Idle(("model", "rotary_base"), _NOT_ROTARY),
    _Idle(("model", "rotary_fraction"), _NOT_ROTARY),
    _Idle(("model", "rotary_scaling"), _NOT_ROTARY),
    _Idle(("model", "experts_per_token"), _DENSE),
    _Idle(("model", "expert_capacity"), _DENSE),
    _Idle(("model", "balance_loss"), _DENSE),
    _Idle(("model", "z_loss"), _DENSE),
    _Idle(("model", "router_bias"), _DENSE),
    _Idle(("data", "validation"), _OTHER_VALIDATION),
    _Idle(("parallel", "context_form"), _NO_CONTEXT),
    _Idle(("parallel", "expert"), _DENSE),
    _Idle(("parallel", "sequence"), _NO_TENSOR),
    _Idle(("parallel", "keep_inputs"), _inputs_are_whole),
    _Idle(("parallel", "decomposed"), _inputs_are_whole),
    _Idle(("parallel", "schedule"), _ONE_STAGE),
    _Idle(("zero", "shard_between_micro_batches"), _WHOLE_GRADIENTS),
    _Idle(("zero", "replicas"), _NO_SHARDS),
    _Idle(("zero", "prefetch"), _WHOLE_PARAMETERS),
    _Idle(("zero", "max_live_parameters"), _WHOLE_PARAMETERS),
    _Idle(("zero", "keep_gathered"), _WHOLE_PARAMETERS),
    _Idle(("optimizer", "betas"), _NOT_ADAM),
    _Idle(("optimizer", "eps"), _NOT_ADAM),
    _Idle(("optimizer", "min_lr"), _CONSTANT),
    _Idle(("comm", "compression"), _plain_to_the_end),
    _Idle(("comm", "density"), _not_kind("topk")),
    _Idle(("comm", "rank"), _not_kind("powersgd")),
    _Idle(("comm", "warmup"), _PLAIN),
    _Idle(("checkpoint", "keep"), _NEVER_SAVES),
    _Idle(("guard", "max_skips"), _NEVER_SKIPS),
    _Idle(("guard", "max_rollbacks"), _NEVER_ROLLS_BACK),
)


def _at(plain: Any, path: Path) -> Any:
    for part in path:
        plain = plain[part]
    return plain


def _setting(config: Config, *path: str) -> str:
    return f"`{path_text(path)}: {quoted(_at(config.plain(), path))}`"


def idle(config: Config) -> Iterator[Problem]:
    """The settings that differ from their default and do nothing, as warnings."""
    plain, default = config.plain(), Config().plain()
    for row in _IDLE:
        value = _at(plain, row.path)
        reason = row.reason(config)
        if reason and value != _at(default, row.path):
            text = f"`{path_text(row.path)}: {quoted(value)}` has no effect because {reason}"
            yield Problem(row.path, text)
    yield from _one_chunk(config)


def _one_chunk(config: Config) -> Iterator[Problem]:
    """Interleaving is of several stages per rank; with one it is 1F1B, bubble and all."""
    block = config.parallel
    if block.schedule == "interleaved" and block.chunks == 1 and block.pipeline > 1:
        text = f"{_setting(config, 'parallel', 'schedule')} is 1f1b with {_setting(config, 'parallel', 'chunks')}"
        yield Problem(("parallel", "schedule"), f"{text}: use parallel.chunks=2 for a smaller bubble")


def contradictions(config: Config) -> Iterator[Problem]:
    """The settings that cannot stand together."""
    if config.parallel.chunks > 1 and config.parallel.pipeline == 1:
        yield Problem(
            ("parallel", "chunks"),
            f"{_setting(config, 'parallel', 'chunks')} has no effect because `parallel.pipeline` is 1: there is "
            "one stage; raise parallel.pipeline or use parallel.chunks=1",
        )
    every = config.recompute.every if isinstance(config.recompute, RecomputeEvery) else 0
    if every > config.model.layers:
        yield Problem(
            ("recompute",),
            f"{_setting(config, 'recompute')} has no effect because {_setting(config, 'model', 'layers')} is less: "
            f"no block would be recomputed; use at most {config.model.layers}",
        )
    yield from _blended(config)
    yield from _compiled(config)
    yield from _compressed(config)
    floor = config.optimizer.min_lr
    # The default floor gives way to a lower lr (`learning_rate`): nobody asked for it.
    asked = floor != Config().optimizer.min_lr and config.optimizer.schedule != "constant"
    if asked and floor > config.optimizer.lr:
        yield Problem(
            ("optimizer", "min_lr"),
            f"{_setting(config, 'optimizer', 'min_lr')} is above {_setting(config, 'optimizer', 'lr')}, and the "
            "learning rate falls from lr to min_lr; lower min_lr or use optimizer.schedule=constant",
        )
    for key, value in (("nonfinite", config.guard.nonfinite), ("spike", config.guard.spike)):
        if value == "rollback" and config.checkpoint.every == 0:
            yield Problem(
                ("guard", key),
                f"{_setting(config, 'guard', key)} goes back to the last checkpoint, and with "
                f"{_setting(config, 'checkpoint', 'every')} none is written; use checkpoint.every=20",
            )
    yield from _words(config)


def _words(config: Config) -> Iterator[Problem]:
    """A vocabulary that lacks some of the tokens. One whose files are gone is not missed before text is read."""
    if config.model.vocab == "auto":
        return
    try:
        tokens = tokenizer_of(config).vocab
    except ConfigError:
        return
    if config.model.vocab < tokens:
        whose = "the byte tokenizer" if config.data.tokenizer == "byte" else config.data.tokenizer
        yield Problem(
            ("model", "vocab"),
            f"{_setting(config, 'model', 'vocab')} is less than {whose}'s {tokens} tokens; use model.vocab=auto",
        )


def _blended(config: Config) -> Iterator[Problem]:
    """A list of sources of which none has a weight."""
    sources = config.data.source
    if isinstance(sources, tuple) and not any(one.weight for one in sources):
        what = "each has `weight: 0`" if sources else "it is empty"
        yield Problem(
            ("data", "source"), f"data.source names nothing to train on: {what}; give one source a weight"
        )


def _compiled(config: Config) -> Iterator[Problem]:
    """What compiled blocks do not go with."""
    if config.compile and config.recompute not in ("none", "selective"):
        yield Problem(
            ("compile",),
            f"{_setting(config, 'compile')} does not go with {_setting(config, 'recompute')}: a block that runs again "
            "may be given other compiled code than the first time, which keeps other tensors; use recompute=none or "
            "selective, or compile=false",
        )


def _compressed(config: Config) -> Iterator[Problem]:
    """What gradient compression does not go with."""
    if config.comm.compression == "none":
        return
    compression = _setting(config, "comm", "compression")
    if config.parallel.expert > 1 and config.model.experts:
        yield Problem(
            ("comm", "compression"),
            f"{compression} does not go with {_setting(config, 'parallel', 'expert')}: gradients of experts are summed "
            "over other ranks than the rest, and what is not sent is kept for one axis; use comm.compression=none or "
            "parallel.expert=1",
        )
    if config.zero.reduce_dtype != "auto":
        yield Problem(
            ("zero", "reduce_dtype"),
            f"{_setting(config, 'zero', 'reduce_dtype')} has no effect with {compression}, which has a format of its "
            "own on the wire; use zero.reduce_dtype=auto or comm.compression=none",
        )
    if config.zero.shard_between_micro_batches is True:
        yield Problem(
            ("zero", "shard_between_micro_batches"),
            f"{_setting(config, 'zero', 'shard_between_micro_batches')} does not go with {compression}: a step's "
            "gradient is compressed once, after its last micro-batch; use zero.shard_between_micro_batches=auto "
            "or comm.compression=none",
        )
