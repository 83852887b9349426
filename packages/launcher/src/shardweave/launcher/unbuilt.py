"""The values that are part of the schema and not built yet: one table, a row each.

Every key of the contract parses from the first version on, so that files written for a later version are checked
by this one. A value that would need code that is not there must not be ignored in silence: it is refused before
anything starts. Building a feature includes deleting its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardweave.launcher.config import Config
from shardweave.launcher.problems import Problem, quoted
from shardweave.launcher.strict_yaml import Path, path_text

__all__ = ["Row", "table", "unbuilt"]


@dataclass(frozen=True)
class Row:
    """A range of one setting that is not built."""

    path: Path
    refused: Callable[[Any], bool]
    """Whether a value of the setting, in the YAML file's types, is not built."""
    feature: str
    """What it would be, as the subject of "... is not built yet"."""
    instead: str
    """What works today."""


def _not(*built: object) -> Callable[[Any], bool]:
    return lambda value: value not in built


table: tuple[Row, ...] = (
    Row(("zero", "offload"), _not("none"), "offloading the optimizer state", "zero.offload=none"),
    Row(("metrics", "tensorboard"), _not(False), "TensorBoard output", "metrics.tensorboard=false"),
)
"""In the order of the schema."""


def unbuilt(config: Config) -> Iterator[Problem]:
    """A problem for every setting of `config` that asks for something that is not built yet."""
    plain = config.plain()
    for row in table:
        value: Any = plain
        for part in row.path:
            value = value[part]
        if row.refused(value):
            setting = f"`{path_text(row.path)}: {quoted(value)}`"
            yield Problem(row.path, f"{setting}: {row.feature} is not built yet; use {row.instead}")
