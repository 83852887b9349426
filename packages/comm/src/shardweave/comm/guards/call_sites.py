"""Which line of a program asked for a communication.

A person who reads about a collective wants the line they wrote, not the line of this package that passed it to
torch. So the stack is read from the inside out: frames of this package and of torch are passed over, frames of other
Shardweave packages are kept beside the user's own, which may have called no collective by name.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

__all__ = ["call_site", "site_of"]

_PACKAGE = __name__.rpartition(".guards")[0]
"""``shardweave.comm``."""
_FAMILY = _PACKAGE.partition(".")[0]


def call_site() -> str:
    """Where this package was called from, as :func:`site_of` says it."""
    return site_of(sys._getframe(1))


def site_of(frame: FrameType | None) -> str:
    """The user's line that led to ``frame``: ``train.py:12 in step``.

    With the line of another Shardweave package where one lies between: ``train.py:12 in step, through
    shardweave/zero/reducer.py:88 in launch``; that line alone when none is the user's.
    """
    through = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _is_in(module, f"{_PACKAGE}.zygote"):  # below it lies what forked this rank, not what it runs
            break
        if _is_in(module, _FAMILY):
            if not through and not _is_in(module, _PACKAGE):
                through = _line(frame)
        elif not _is_in(module, "torch"):
            return f"{_line(frame)}, through {through}" if through else _line(frame)
        frame = frame.f_back
    return through


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _line(frame: FrameType) -> str:
    """``shardweave/zero/reducer.py:88 in launch``; others' files relative to the working directory."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
    if _is_in(module, _FAMILY):
        path = module.replace(".", "/") + ".py"
    else:
        path = code.co_filename.removeprefix(os.getcwd() + os.sep)
    return f"{path}:{frame.f_lineno} in {code.co_qualname}"
