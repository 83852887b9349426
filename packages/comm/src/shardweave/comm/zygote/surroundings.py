"""What a group takes over from its owner: directory, import path, environment, warning filters."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from re import Pattern
from typing import Any

__all__ = ["Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """The owner's state at the time it asked for ranks, which may differ from the zygote's."""

    directory: str
    path: tuple[str, ...]
    """``sys.path``"""
    environment: Mapping[str, str]
    filters: tuple[tuple[Any, str, Any, str, int], ...]
    """Arguments of :func:`warnings.filterwarnings`, the first in force first."""

    @classmethod
    def here(cls) -> Surroundings:
        return cls(
            directory=os.getcwd(),
            path=tuple(sys.path),
            environment=dict(os.environ),
            filters=tuple(
                (action, _pattern(message), category, _pattern(module), line)
                for action, message, category, module, line in warnings.filters
            ),
        )

    def enter(self) -> None:
        """Takes everything over but the warning filters."""
        os.chdir(self.directory)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)

    def filter_warnings(self) -> None:
        warnings.resetwarnings()
        for action, message, category, module, line in self.filters:
            warnings.filterwarnings(action, message, category, module, line, append=True)


def _pattern(expression: Pattern[str] | str | None) -> str:
    if expression is None:
        return ""
    return expression if isinstance(expression, str) else expression.pattern
