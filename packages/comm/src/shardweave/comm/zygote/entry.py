"""Entry points travel as names: a module, or a file for what no import statement reaches, and a dotted name.

Pickling a function does the same for importable modules only; the functions of a pytest test file (its
modules are not on ``sys.path``) or of a script need the file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Entry", "EntryError"]

_SCRIPT = "__mp_main__"  # as multiprocessing names it


class EntryError(ValueError):
    """An entry point that does not exist, does not import, or cannot be named."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason = reason
        self.traceback = traceback
        """Of the import that failed in the leader; empty when there was none."""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.traceback}" if self.traceback else self.reason


@dataclass(frozen=True)
class Entry:
    """A function by name; :meth:`resolve` finds it in another process."""

    module: str
    """The name under which the module is imported (and under which classes in it are pickled)."""
    qualname: str
    """Dotted name inside the module: ``train`` or ``TestRing.test_sum``. Empty: the module itself."""
    path: str | None = None
    """The file to import ``module`` from, when it is not importable by its name."""

    @classmethod
    def parse(cls, text: str) -> Entry:
        """From ``module:function``."""
        module, colon, qualname = text.partition(":")
        if not (module and colon and qualname):
            raise EntryError(f"entry point {text!r} is not of the form module:function, such as my_run:main")
        return cls(module, qualname)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Entry:
        """The name of ``function``, which must be defined at the top of a module or of a class in one."""
        function = inspect.unwrap(function)
        qualname = getattr(function, "__qualname__", "")
        if not qualname or "<" in qualname:
            raise EntryError(
                f"{qualname or function!r} has no name that another process can look up: "
                "define it at the top of a module and pass what it needs as arguments"
            )
        module = function.__module__
        path = inspect.getsourcefile(function)
        if path is None or _found_by_name(module, path):
            return cls(module, qualname)
        return cls(module, qualname, str(Path(path).resolve()))

    def load(self) -> Any:
        """:meth:`resolve`, with every way in which an import can fail as an EntryError."""
        try:
            return self.resolve()
        except EntryError:
            raise
        except BaseException as error:  # a module may do anything while it is imported, sys.exit() included
            reason = f"{self.path or self.module} does not import: {type(error).__name__}: {error}"
            raise EntryError(reason, _frames_of_module(error)) from error

    def resolve(self) -> Any:
        """Imports the module if need be and returns the function; EntryError when it has no such name."""
        module = self._import()
        found: Any = module
        for name in self.qualname.split(".") if self.qualname else ():
            try:
                found = getattr(found, name)
            except AttributeError:
                raise EntryError(f"{self.path or self.module} has no {self.qualname!r}") from None
        return found

    def _import(self) -> ModuleType:
        loaded = sys.modules.get(self.module)
        if self.path is None:
            return loaded or importlib.import_module(self.module)
        # A script that forked this process while it ran may not have come to the function yet.
        there = hasattr(loaded, self.qualname.partition(".")[0]) if self.qualname else True
        if loaded is not None and getattr(loaded, "__file__", None) == self.path and there:
            return loaded
        # A script is not run again: under another name its `if __name__ == "__main__"` part stays quiet.
        spec = _spec(_SCRIPT if self.module == "__main__" else self.module, self.path)
        if spec is None or spec.loader is None:
            raise EntryError(f"{self}: {self.path} is not a file that Python can import")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = sys.modules[self.module] = module  # before it runs: pickle looks there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


def _frames_of_module(error: BaseException) -> str:
    """The traceback without the frames of the import machinery; empty when nothing else is in it."""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return "".join(traceback.format_exception(type(error), error, trace))
        trace = trace.tb_next
    return ""


@functools.cache  # asked for every group of a test file; a file does not become importable in between
def _found_by_name(module: str, path: str) -> bool:
    """Whether ``import module`` in a fresh interpreter with this sys.path would run the file ``path``."""
    try:
        # Not importlib.util.find_spec: it answers from sys.modules, where pytest puts test files too.
        locations = None
        if "." in module:
            parent = sys.modules.get(module.rpartition(".")[0])
            if parent is None or getattr(parent, "__path__", None) is None:
                return False
            locations = list(parent.__path__)
        spec = importlib.machinery.PathFinder.find_spec(module, locations)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).samefile(path)


def _spec(module: str, path: str) -> ModuleSpec | None:
    """How to load ``path`` as ``module``: by an import hook if one wants it (pytest rewrites asserts so)."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)  # old finders have none
        spec: ModuleSpec | None = find_spec(module, [str(Path(path).parent)]) if find_spec else None
        if spec is not None and spec.origin == path:
            return spec
    return importlib.util.spec_from_file_location(module, path)
