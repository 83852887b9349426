"""Keeps torch.compile out of what communicates.

What torch.compile traces it runs as it was once: lengths that ranks have told each other become constants, and the
ledger and the watchdog are skipped. Functions marked here run as they are written; what lies between them is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

__all__ = ["eager"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that torch.compile does not look into: it calls it, between two graphs."""
    hidden = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        # True where it is traced only. Otherwise nothing of the compiler is asked, or imported.
        if torch.compiler.is_compiling():
            return hidden(*arguments, **named)
        return function(*arguments, **named)

    return call
