"""What a group takes over from its owner: directory, import path, environment, warning filters."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from re import Pattern

__all__ = ["Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """The owner's state at the time it asked for ranks, which may differ from the zygote's."""

    directory: str
    path: tuple[str, ...]
    """``sys.path``"""
    environment: Mapping[str, str]
    filters: tuple[bytes, ...]
    """Pickled arguments of :func:`warnings.filterwarnings`, the first in force first. Pickled one by one, as a
    category may be a class that only this process, or only a rank, can import."""

    @classmethod
    def here(cls) -> Surroundings:
        filters = []
        for action, message, category, module, line in warnings.filters:
            with contextlib.suppress(pickle.PicklingError, AttributeError):
                filters.append(pickle.dumps((action, _pattern(message), category, _pattern(module), line)))
        return cls(os.getcwd(), tuple(sys.path), dict(os.environ), tuple(filters))

    def enter(self) -> None:
        """Takes everything over but the warning filters."""
        os.chdir(self.directory)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)

    def filter_warnings(self) -> None:
        warnings.resetwarnings()
        for arguments in self.filters:
            with contextlib.suppress(ImportError, AttributeError):
                action, message, category, module, line = pickle.loads(arguments)  # noqa: S301 -- the owner's
                warnings.filterwarnings(action, message, category, module, line, append=True)


def _pattern(expression: Pattern[str] | str | None) -> str:
    if expression is None:
        return ""
    return expression if isinstance(expression, str) else expression.pattern
