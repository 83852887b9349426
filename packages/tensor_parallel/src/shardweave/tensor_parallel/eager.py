"""Keeps torch.compile out of what communicates.

What torch.compile traces it runs as it was once: lengths that ranks have told each other become constants, and the
ledger and the watchdog are skipped. Functions marked here run as they are written; what lies between them is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo

__all__ = ["eager"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that torch.compile does not look into: it calls it, between two graphs."""
    hidden = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        # While it is traced, or called between two graphs. Otherwise nothing of the compiler is asked, or imported.
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return hidden(*arguments, **named)
        return function(*arguments, **named)

    # torch.compile counts traces by code, of which all marked functions would otherwise have one together.
    code = cast(FunctionType, call)
    code.__code__ = code.__code__.replace(co_name=function.__name__)
    return call
