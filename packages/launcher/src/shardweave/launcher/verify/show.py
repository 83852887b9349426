"""The answer of ``shardweave verify`` for a person, and for a program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardweave.launcher.display import show_rows
from shardweave.launcher.exit_status import PARTED
from shardweave.launcher.verify.places import Kind, phrase
from shardweave.launcher.verify.question import Question
from shardweave.launcher.verify.report import Report

__all__ = ["PARTED", "answer_text", "show_answer", "show_question"]

_HEADER = ("model", "layout", "batch", "data")
_FOLLOWING = 5
"""Partings after the first that a person is shown."""

_KINDS: dict[Kind, str] = {
    "start": "initial parameters",
    "received": "received hidden states",
    "hidden": "hidden states",
    "loss": "loss",
    "flow": "gradients of hidden states",
    "sent": "gradients sent back",
    "gradient": "gradients",
    "norm": "gradient norm",
    "parameter": "parameters",
}


def show_question(console: Console, question: Question) -> None:
    """What will be compared, and how it differs from the configuration."""
    rows = [row for row in question.overview.header() if row[0] in _HEADER]
    label = "changed"
    for change in question.changes:
        rows.append((label, str(change)))
        label = ""
    steps = "step" if question.steps == 1 else f"{question.steps} steps"
    rows.append(("compared", f"the first {steps}, with one process on the same data"))
    show_rows(console, rows)


def show_answer(console: Console, report: Report) -> None:
    """The largest difference of each kind with its place, then the verdict."""
    head = ("", "largest difference", "tolerance", "where")
    rows = list(_rows(report))
    if console.is_terminal:
        table = Table(*head[:-1], box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(head[-1], overflow="fold")
        for row, difference in zip(rows, report.largest, strict=True):
            table.add_row(*row, style="red" if difference.parts else "")
        console.print(table)
    else:
        for line in _columns([head, *rows]):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(report.headline(), style="bold green" if report.equal else "bold red"), soft_wrap=True)
    for parting in report.partings[1 : 1 + _FOLLOWING]:
        console.print(Text(f"then {parting.difference}, on {_ranks(parting.ranks)}"), soft_wrap=True)
    rest = len(report.partings) - 1 - _FOLLOWING
    if rest > 0:
        console.print(Text("and more after that: what follows a first difference is mostly its consequence"))


def answer_text(question: Question, report: Report) -> str:
    """The whole answer as one JSON object."""
    return json.dumps(report.plain() | {"changed": question.plain_changes()}, indent=1)


def _rows(report: Report) -> Iterator[tuple[str, str, str, str]]:
    for found in report.largest:
        where = f"step {found.step}, " if found.step else ""
        thing = f"{phrase(found.kind, found.name)}, " if found.name else ""
        place = "everywhere" if not found.relative else f"{where}{thing}{report.where(found.rank)}"
        yield _KINDS[found.kind], f"{found.relative:.1e}", f"{found.tolerance:.0e}", place


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
