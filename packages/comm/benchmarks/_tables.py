"""How the benchmarks print: tables of ratios for people, the same rows as JSON for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from shardweave.comm.testing.hosts import hosts_unavailable

__all__ = ["Table", "Value", "arguments", "machine", "report", "require_hosts", "verdict"]

Value = str | int | float


@dataclass(frozen=True)
class Table:
    """Rows with the same columns, in the same order."""

    title: str
    """What is measured, against what, on what."""
    rows: Sequence[Mapping[str, Value]]
    notes: Sequence[str] = ()
    """Sentences below it: what limits the figures."""

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.title}\n  nothing was measured"
        columns = list(self.rows[0])
        cells = [columns, *([_text(row[column]) for column in columns] for row in self.rows)]
        widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
        left = [isinstance(value, str) for value in self.rows[0].values()]
        lines = [
            "  ".join(
                cell.ljust(width) if to_left else cell.rjust(width)
                for cell, width, to_left in zip(line, widths, left, strict=True)
            ).rstrip()
            for line in cells
        ]
        return "\n".join(
            [self.title, *(f"  {line}" for line in lines), *(f"  ({note})" for note in self.notes)]
        )


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    """What was asked of a figure, and whether this run shows it."""
    met = value >= limit if at_least else value <= limit
    return f"{'>=' if at_least else '<='} {_text(limit)}: {'yes' if met else 'NO'}"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take; ``doc``: the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser


def require_hosts() -> None:
    """Ends the program, with status 0 and the reason, where this machine cannot make hosts."""
    if (reason := hosts_unavailable()) is not None:
        print(f"not measured: {reason}")
        sys.exit(0)


def machine() -> str:
    """What the figures were measured on, and how busy it was."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), load {load}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def report(tables: Sequence[Table], file: Path | None) -> None:
    """Prints the tables below a line on the machine; writes them to ``file`` if there is one."""
    print(machine())
    for table in tables:
        print(f"\n{table}")
    if file is not None:
        content = {
            "machine": machine(),
            "command": " ".join(sys.argv),
            "tables": [{"title": t.title, "rows": list(t.rows), "notes": list(t.notes)} for t in tables],
        }
        file.write_text(json.dumps(content, indent=1) + "\n")


def _text(value: Value) -> str:
    """Numbers with three significant digits, and whole where they are large."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
