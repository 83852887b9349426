"""Schedules as JSON, for programs that make or read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ScheduleError
from .written import Written

__all__ = ["from_json", "to_json"]


def to_json(written: Written) -> str:
    """The JSON that :func:`from_json` reads as ``written``; the actions of a rank stand on one line."""
    head = {
        "name": written.name,
        "micro_batches": written.micro_batches,
        "rank_of_stage": written.rank_of_stage,
        "training": written.training,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in written.rows)
    return "\n".join(["{", *lines, '  "actions": [', rows, "  ]", "}"])


def from_json(text: str | Mapping[str, Any]) -> Written:
    """What a JSON text, or the object read from one, says.

    Raises:
        ScheduleError: it is no JSON, or a key has a value of another type.
    """
    if isinstance(text, str):
        try:
            text = json.loads(text)
        except ValueError as error:
            raise ScheduleError(f"this is no JSON: {error}") from None
    if not isinstance(text, Mapping):
        raise ScheduleError(f"a schedule is a JSON object with the key 'actions', not {type(text).__name__}")
    rows = _value(text, "actions", _is_rows, "a list of texts per rank, as in [['0F0', '0B0']]")
    ranks = _value(text, "rank_of_stage", _is_ranks, "a list of ranks, one per stage", None)
    return Written(
        rows=tuple(map(tuple, rows)),
        name=_value(text, "name", _is_text, "a text", "written"),
        micro_batches=_value(text, "micro_batches", _is_number, "a whole number", None),
        rank_of_stage=None if ranks is None else tuple(ranks),
        training=_value(text, "training", lambda value: isinstance(value, bool), "true or false", True),
    )


_REQUIRED = object()


def _value(
    entries: Mapping[str, Any], key: str, is_right: Callable[[Any], bool], rule: str, default: Any = _REQUIRED
) -> Any:
    if key not in entries and default is not _REQUIRED:
        return default
    value = entries.get(key)
    if not is_right(value) and not (value is None and default is None):
        raise ScheduleError(f"schedule in JSON: {key!r} is {value!r}; it has to be {rule}")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ranks(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def _is_rows(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(row, list | tuple) and all(map(_is_text, row)) for row in value)
    )
