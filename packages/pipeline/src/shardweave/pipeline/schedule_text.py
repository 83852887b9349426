"""Schedules as text that a person writes: a line per rank under a few lines about the whole."""

from __future__ import annotations

import re
from typing import TypeVar

from .errors import ScheduleError
from .written import Written

__all__ = ["from_text", "to_text"]

_Key = TypeVar("_Key")

_RANK = re.compile(r"rank +(\d+)(?: +(.*))?")
_KEY = re.compile(r"(name|micro-batches|rank of stage|training): *(.*)")


def to_text(written: Written) -> str:
    """The text that :func:`from_text` reads as ``written``.

    Raises:
        ValueError: the name would not be read back because it is not one line, or has space at an end.
    """
    if written.name.splitlines() != [written.name.strip()]:
        raise ValueError(
            f"the name {written.name!r} has no text form; it has to be one line, not padded by space"
        )
    head = [f"name: {written.name}"]
    if written.micro_batches is not None:
        head.append(f"micro-batches: {written.micro_batches}")
    if written.rank_of_stage is not None:
        head.append(f"rank of stage: {' '.join(map(str, written.rank_of_stage))}")
    if not written.training:
        head.append("training: no")
    return "\n".join(
        [*head, *(f"rank {rank}  {' '.join(row)}".rstrip() for rank, row in enumerate(written.rows))]
    )


def from_text(text: str) -> Written:
    """What ``text`` says. Empty lines and those that begin with ``#`` say nothing.

    Raises:
        ScheduleError: a line is none of those that there are, or there twice, or a rank is missing.
    """
    keys: dict[str, str] = {}
    rows: dict[int, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        if match := _KEY.fullmatch(line):
            _enter(keys, match[1], match[2], number, match[1])
        elif match := _RANK.fullmatch(line):
            _enter(rows, int(match[1]), match[2] or "", number, f"rank {int(match[1])}")
        else:
            raise ScheduleError(
                f"line {number} is {line!r}; it has to be 'rank 0  0F0 0B0 ...', 'name: ...', "
                "'micro-batches: 2', 'rank of stage: 0 1 ...', 'training: no', or a comment behind '#'"
            )
    if sorted(rows) != list(range(len(rows))) or not rows:
        raise ScheduleError(f"there are lines for the ranks {sorted(rows)}; give one for each, from 0 on")
    return Written(
        rows=tuple((rows[rank],) for rank in range(len(rows))),
        name=keys.get("name", "written"),
        micro_batches=_number("micro-batches", keys["micro-batches"]) if "micro-batches" in keys else None,
        rank_of_stage=_numbers(keys["rank of stage"]) if "rank of stage" in keys else None,
        training=_yes(keys.get("training", "yes")),
    )


def _enter(entries: dict[_Key, str], key: _Key, value: str, number: int, what: str) -> None:
    if key in entries:
        raise ScheduleError(f"line {number}: {what!r} is there twice; leave one out")
    entries[key] = value


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(_number("rank of stage", word) for word in value.split())


def _number(key: str, word: str) -> int:
    if not word.isdecimal():
        raise ScheduleError(f"'{key}: ...' holds {word!r}; it takes whole numbers from 0 up")
    return int(word)


def _yes(value: str) -> bool:
    if value not in ("yes", "no"):
        raise ScheduleError(f"'training: {value}' is neither 'training: yes' nor 'training: no'")
    return value == "yes"
