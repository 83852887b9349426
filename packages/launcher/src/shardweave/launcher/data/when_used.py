"""Names of a package that are imported when they are first used, as PEP 562 has it.

The package's own ``__init__`` then costs nothing, though importing any submodule runs it first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["when_used"]


def when_used(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``. `homes`: in which of its submodules each name is."""
    names = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(import_module(f"{package}.{homes[name]}"), name)
        return names[name]

    return get, lambda: sorted({*names, *homes})
