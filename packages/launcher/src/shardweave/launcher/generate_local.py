"""``shardweave generate`` on several local ranks, each of which reads and holds its own part of the model."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardweave.launcher.on_ranks import ONE_PROCESS, on_ranks, started_by_others
from shardweave.launcher.sampling import Sampling
from shardweave.launcher.zygote_first import with_zygote

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote

__all__ = ["generate_on_ranks"]

_RANK = "shardweave.launcher.generate_rank"

_KEYS = (
    "parallel.tensor", "parallel.pipeline", "parallel.chunks", "parallel.schedule", "run.device", "comm.timeout",
)  # fmt: skip
"""What changes where a text is made, and not the text."""

_NOTHING_TRAINED = (
    "parallel={sequence: true, keep_inputs: false, decomposed: false}", "comm.compression=none",
)  # fmt: skip
"""Defaults, where a run's own setting is for training alone."""


def generate_on_ranks(
    path: Path, prompts: Sequence[str], overrides: Sequence[str], sampling: Sampling, port: int
) -> int:
    """Prints the prompts and their continuations, computed on the layout of `overrides`; returns the exit status."""
    if started := started_by_others("generate"):
        return started
    return with_zygote([_RANK], lambda zygote: _generate(path, prompts, overrides, sampling, port, zygote))


def _generate(
    path: Path,
    prompts: Sequence[str],
    overrides: Sequence[str],
    sampling: Sampling,
    port: int,
    zygote: Zygote,
) -> int:
    from dataclasses import asdict

    from shardweave.launcher.generate import encoded, located, others, warnings, words_of
    from shardweave.launcher.layout import check_fit, layout_of
    from shardweave.launcher.prompts import text_of
    from shardweave.launcher.reading import read_config
    from shardweave.launcher.shape import transformer_config
    from shardweave.pipeline import RULES

    run, checkpoint = located(path)
    _check(overrides)
    loaded = read_config(
        run / "config.yaml", [*ONE_PROCESS, *_NOTHING_TRAINED, *_placement(overrides), *overrides]
    )
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    config = loaded.config
    for warning in warnings(config, run, checkpoint):
        print(f"warning: {warning}", file=sys.stderr)
    words, layout = words_of(config, run), layout_of(config)
    check_fit(config, layout, transformer_config(config))
    least = RULES[config.parallel.schedule].least(
        layout.pipeline
    )  # nothing is trained: whatever the schedule takes
    batch = config.batch.model_copy(update={"global_": least, "micro": 1})
    with tempfile.TemporaryDirectory(prefix="shardweave-generate-") as place:
        result = Path(place, "texts.json")
        payload = {
            "config": config.model_copy(update={"batch": batch}).plain(),
            "checkpoint": str(checkpoint),
            "otherwise": others(path),
            "texts": encoded(words, prompts),
            "result": str(result),
            "end": None if sampling.ignore_end else words.end_of_text,
            **asdict(sampling),
        }
        status = on_ranks(
            f"{_RANK}:main", payload, layout.world_size, port, zygote, undone="there is no text"
        )
        if not status:
            texts = json.loads(result.read_text(encoding="utf-8"))
            for prompt, text in zip(prompts, texts, strict=True):
                sys.stdout.write(text_of(words, prompt, text, ignore_end=sampling.ignore_end) + "\n")
    return status


def _check(overrides: Sequence[str]) -> None:
    from shardweave.launcher.problems import ConfigError, Problem

    problems = [
        Problem(
            (), f"`{override}`: generate takes {', '.join(_KEYS)} as KEY=VALUE; all else is the run's own"
        )
        for override in overrides
        if override.partition("=")[0].strip() not in _KEYS
    ]
    if problems:
        raise ConfigError(problems)


def _placement(overrides: Sequence[str]) -> list[str]:
    """What follows from the layout: one token at a time cannot be cut over tensor ranks; and with several stages on a
    rank and no word on how they lie, they lie as most schedules have them."""
    given = {
        key.strip(): value.strip() for key, _, value in (override.partition("=") for override in overrides)
    }
    shared = given.get("parallel.tensor", "1") != "1"
    several = given.get("parallel.chunks", "1") != "1" and "parallel.schedule" not in given
    return [
        *(["parallel.sequence=false"] if shared else []),
        *(["parallel.schedule=interleaved"] if several else []),
    ]
