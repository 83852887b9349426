"""Which settings may change between a checkpoint and the run that continues from it: one table, a row each.

A checkpoint knows no layout, so everything about ranks is free to change. What makes the parameters mean something
else cannot. In between lies what makes the continuation another training run than the uninterrupted one would have
been: a person may want that, so it is accepted, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardweave.launcher.problems import quoted

__all__ = ["TABLE", "Kind", "Row", "changed_settings", "row_of"]


class Kind(Enum):
    """What a change of a setting means."""

    FREE = "free"
    """Nothing: the run is the same."""
    TOLD = "told"
    """The run goes on in another way from here on; it is listed."""
    REFUSED = "refused"
    """The checkpoint is of something else."""


@dataclass(frozen=True)
class Row:
    """One setting, or all below a block."""

    path: str
    kind: Kind
    note: str = ""
    """What follows from a change, for a person."""
    refused_when: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] | None = None
    """Of the saved and the present settings: whether the change is refused after all."""


def _either(path: str, value: object) -> Callable[[Mapping[str, Any], Mapping[str, Any]], bool]:
    return lambda there, here: value in (there.get(path), here.get(path))


TABLE: tuple[Row, ...] = (
    Row("run", Kind.FREE),
    Row("run.steps", Kind.TOLD, "the learning-rate schedule spans other steps"),
    Row("run.seed", Kind.TOLD, "samples come in another order from here on"),
    Row("model", Kind.REFUSED),
    Row("model.preset", Kind.FREE),  # it only names values of the keys below
    Row("model.weights", Kind.FREE),  # of the start
    Row(
        "model.sequence",
        Kind.TOLD,
        "the text is cut into other samples from here on",
        _either("model.position", "learned"),  # the table of positions has its length
    ),
    Row("model.rotary_base", Kind.TOLD, "positions are told in another way from here on"),
    Row("model.rotary_scaling", Kind.TOLD, "positions are told in another way from here on"),
    Row("model.dropout", Kind.TOLD),
    Row("model.attention_dropout", Kind.TOLD),
    Row("model.expert_capacity", Kind.TOLD),
    Row("model.balance_loss", Kind.TOLD),
    Row("model.z_loss", Kind.TOLD),
    Row("model.head_z_loss", Kind.TOLD),
    Row(
        "model.router_bias", Kind.TOLD, "", _either("model.router_bias", 0.0)
    ),  # the biases are there, or not
    Row("data", Kind.TOLD, "other samples from here on"),
    Row("data.source", Kind.FREE),  # texts and weights are compared (`data.position`), not where they lie
    Row(
        "data.validation_source",
        Kind.TOLD,
        "evaluations are of another text, and training of the rest, from here on",
    ),
    Row("data.separate_documents", Kind.TOLD, "documents of a sample see each other, or not, from here on"),
    Row("data.tokenizer", Kind.FREE),  # what it does is compared, not where it lies
    Row("data.end_of_text", Kind.FREE),  # it is in the text, which is compared
    Row("data.field", Kind.FREE),
    Row("data.workers", Kind.FREE),
    Row("data.log_samples", Kind.FREE),
    Row("parallel", Kind.FREE),
    Row("zero", Kind.FREE),
    Row("zero.gradient_dtype", Kind.TOLD),
    Row("zero.reduce_dtype", Kind.TOLD),
    Row("batch", Kind.FREE),
    Row("batch.global", Kind.TOLD, "steps take other numbers of samples, from the same place in the data on"),
    Row("optimizer", Kind.TOLD),
    Row("optimizer.name", Kind.REFUSED),
    Row("precision", Kind.TOLD, "", _either("precision", "fp64")),  # masters are fp32 in all others
    Row("recompute", Kind.FREE),
    Row("compile", Kind.FREE),
    Row("comm", Kind.FREE),
    Row("comm.compression", Kind.TOLD),
    Row("comm.density", Kind.TOLD),
    Row("comm.rank", Kind.TOLD),
    Row("comm.warmup", Kind.TOLD),
    Row("checkpoint", Kind.FREE),
    Row("guard", Kind.TOLD),
    Row("metrics", Kind.FREE),
)


def row_of(path: str) -> Row:
    """The row that decides on a setting: the longest path that it lies under.

    KeyError: no row does.
    """
    parts = path.split(".")
    by_path = {row.path: row for row in TABLE}
    for length in range(len(parts), 0, -1):
        if (row := by_path.get(".".join(parts[:length]))) is not None:
            return row
    raise KeyError(path)


def changed_settings(
    there: Mapping[str, Any], here: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is refused and what is told, a phrase each, of two resolved configurations as plain dicts.

    A setting that one of them does not know, of another version, is left out.
    """
    saved, present = dict(_flat(there)), dict(_flat(here))
    refused, told = [], []
    for path, value in present.items():
        if path not in saved or saved[path] == value:
            continue
        row = row_of(path)
        text = f"`{path}: {quoted(value)}` (there: {quoted(saved[path])})"
        is_refused = row.kind is Kind.REFUSED or (row.refused_when and row.refused_when(saved, present))
        if is_refused:
            refused.append(text)
        elif row.kind is Kind.TOLD:
            told.append(text + (f": {row.note}" if row.note else ""))
    return tuple(refused), tuple(told)


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Block by block; what a key in one holds is one setting, also where it is keys again."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", part) for inner, part in value.items())
        else:
            yield key, value
