"""A directory of Hugging Face files: its ``config.json``, and safetensors files of which parts can be read.

Only the small headers are read when it is opened. What a rank asks for later, and nothing else, is read from the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import HuggingFaceError

__all__ = ["CONFIG", "DTYPES", "INDEX", "SINGLE", "Stored", "Weights", "read_json"]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""What a file calls them, and torch."""


@dataclass(frozen=True)
class Stored:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As the file calls it."""


class Weights:
    """The tensors of a directory, all files together.

    Raises:
        HuggingFaceError: when there are none, or a file cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, Stored] = {}
        """By the names in the files."""
        names = _index(directory)
        for path in _files(directory, names):
            self._look(path)
        self._check_index(names)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A block of one tensor, in the file's dtype, on the CPU."""
        stored = self.tensors[name]
        block: Tensor = _guarded(stored.file, lambda: self._opened(stored.file).get_slice(name)[index])
        return block

    def _look(self, path: Path) -> None:
        file = self._opened(path)
        for name in _guarded(path, file.keys):
            if name in self.tensors:
                raise HuggingFaceError(
                    f"{name} is in {path} and in {self.tensors[name].file}; remove the file that is not meant"
                )
            seen = file.get_slice(name)
            self.tensors[name] = Stored(path, tuple(seen.get_shape()), seen.get_dtype())

    def _check_index(self, names: Mapping[str, str] | None) -> None:
        if names is None:
            return
        lost = [name for name, file in names.items() if self._file_of(name) != file]
        if lost:
            raise HuggingFaceError(
                f"{self.directory / INDEX} names tensors that the files do not hold: {_some(lost)}; "
                "the download may be incomplete"
            )

    def _file_of(self, name: str) -> str | None:
        return self.tensors[name].file.name if name in self.tensors else None

    def _opened(self, path: Path) -> Any:
        """Kept open: a model is read from a few files, by thousands of small requests."""
        if path not in self._open:
            self._open[path] = _guarded(path, lambda: safe_open(path, "pt", device="cpu"))
        return self._open[path]


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file.

    Raises:
        HuggingFaceError: when there is no such file, or it holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HuggingFaceError(
            f"{path} does not exist; give a directory that holds {CONFIG} and {SINGLE} (or {INDEX} and its files)"
        ) from None
    except (OSError, ValueError) as error:
        raise HuggingFaceError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise HuggingFaceError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def _index(directory: Path) -> dict[str, str] | None:
    """The file of each tensor, by the index; ``None`` without one."""
    if not (directory / INDEX).is_file():
        return None
    names = read_json(directory / INDEX).get("weight_map")
    plain = isinstance(names, dict) and all(
        isinstance(file, str) and Path(file).name == file for file in names.values()
    )
    if not plain:
        raise HuggingFaceError(
            f"{directory / INDEX} has no weight_map from tensors to files of this directory"
        )
    return dict(names or {})


def _files(directory: Path, names: Mapping[str, str] | None) -> list[Path]:
    if names is not None:
        return [directory / file for file in sorted(set(names.values()))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    hint = (
        f"; it has {pickled[0]}, which may run code when it is read: save the model anew with transformers, which "
        "writes safetensors"
        if pickled
        else ""
    )
    raise HuggingFaceError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}")


def _guarded(path: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (OSError, SafetensorError) as error:
        raise HuggingFaceError(f"{path} cannot be read: {error}; it may be missing or cut short") from None


def _some(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
