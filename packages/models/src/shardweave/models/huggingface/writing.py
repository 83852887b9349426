"""A model of any layout as a directory of Hugging Face files, written by all ranks at once.

::

    [1] first rank   DIR.partial with all files at their full sizes, headers in place
    [2] every rank   its own parts, written to where they belong: nothing is gathered, and of copies one rank writes
    [3] first rank   config.json, index, tokenizer files; DIR.partial becomes DIR

After each of them all ranks hear whether it went well, so that one rank's full disk is everybody's error, in the same
words, and a directory that has its name is whole.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardweave.comm import (
    Axis,
    Rectangle,
    counts_here,
    full_index,
    gather_values,
    sharding_of,
)
from shardweave.comm.files import sync_directory, write_atomically

from ..config import TransformerConfig
from ..shapes import count_parameters
from ..transformer import Transformer
from .configs import TOKENS, config_to_json
from .directory import CONFIG, DTYPES, INDEX, read_json
from .errors import HuggingFaceError
from .families import Family, family_for
from .files import OutputFile, TensorPlace, byte_count, index_json, plan_files, runs
from .mapping import Piece, matches, pieces, pieces_by_parameter

__all__ = ["TOKENIZER_FILES", "copy_tokenizer", "to_huggingface"]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt",
    "vocab.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""What travels along with a model's weights, as it is."""

T = TypeVar("T")

_PART = 1 << 24  # bytes copied at once, beside what a rank holds anyway


def to_huggingface(
    model: Transformer | Sequence[Transformer],
    directory: str | Path,
    *,
    family: str | None = None,
    world: Axis | None = None,
    dtype: torch.dtype | None = None,
    shard_size: str | int = "5GB",
    tokenizer_from: str | Path | None = None,
    end_of_text: int | None = None,
) -> Path:
    """Writes ``config.json`` and safetensors files that ``transformers`` loads; collective over ``world``.

    Args:
        model: this rank's parts of the model, one for each of its pipeline stages, or the whole.
        directory: made here; it must not exist. On several nodes, one that all ranks share.
        family: gpt2, bloom, gpt_neox, llama or mixtral; ``None``: the one that can hold a model of this shape.
        world: all ranks that hold parts of the model, copies of it (data ranks) included: ``mesh.world``. ``None``:
            this process holds all of it.
        dtype: of the files; ``None``: the parameters'.
        shard_size: of one file, at most, unless one tensor is larger: a number of bytes, or a text as ``"5GB"``.
        tokenizer_from: a directory of which tokenizer files are copied, and whose ``config.json``, if there is one,
            says the numbers of special tokens.
        end_of_text: the token that ends a document, where nothing there says it: texts of the model stop at it.

    Each rank writes what it holds to its place in the files, so no rank needs memory for more than that and a copy of
    one parameter's part. Where a data axis shards the parameters (ZeRO stage 3), they are gathered and freed one after
    the other. A tied head is not written: the family's files do not hold it.

    Returns the directory. The same on all ranks:

    Raises:
        HuggingFaceError: for a directory that exists, parts that are not the whole model, a full disk.
        ValueError: for a model that no family can hold; the text names the fields.
    """
    modules = (model,) if isinstance(model, Transformer) else tuple(model)
    export = _Export(modules, Path(directory), family, world or Axis.single(), dtype, shard_size)
    export.check()
    export.together(export.begin)
    written = export.together(export.write)
    export.check_whole(written)
    source = None if tokenizer_from is None else Path(tokenizer_from)
    export.together(lambda: export.finish(source, end_of_text))
    return export.directory


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies those of :data:`TOKENIZER_FILES` that there are."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


class _Export:
    """One directory in the making."""

    def __init__(
        self,
        modules: tuple[Transformer, ...],
        directory: Path,
        family: str | None,
        world: Axis,
        dtype: torch.dtype | None,
        shard_size: str | int,
    ) -> None:
        self.modules, self.directory, self.world = modules, directory, world
        self.partial = directory.with_name(directory.name + ".partial")
        self.config: TransformerConfig = modules[0].config
        self.family: Family = family_for(self.config, family)
        self.dtype = dtype or next(modules[0].parameters()).dtype
        names = {kind: name for name, kind in DTYPES.items()}
        if self.dtype not in names:
            raise HuggingFaceError(f"dtype: {self.dtype} is not one of {', '.join(map(str, names))}")
        self.files: tuple[OutputFile, ...] = plan_files(
            pieces(self.config, self.family), names[self.dtype], self.dtype.itemsize, byte_count(shard_size)
        )

    def check(self) -> None:
        """What must be so before anything is made."""
        self.together(self._check_absent)

    def begin(self) -> None:
        """[1] The first rank makes files of full size, so that no rank's write changes one."""
        if not self.world.is_first:
            return
        shutil.rmtree(self.partial, ignore_errors=True)  # left by an export that did not end well
        self.partial.mkdir(parents=True)
        for file in self.files:
            with (self.partial / file.name).open("wb") as handle:
                handle.write(file.header)
                handle.truncate(file.size)

    def write(self) -> int:
        """[2] This rank's parts; returns how many elements they have."""
        places = {name: place for file in self.files for name, place in file.tensors.items()}
        known = pieces_by_parameter(self.config, self.family)
        written = 0
        with _Files(self.partial) as files:
            for parameter in dict.fromkeys(p for module in self.modules for p in module.parameters()):
                # A copy, by every rank alike, whoever writes it: at ZeRO stage 3 reading gathers it, from all.
                values = parameter.detach().to(self.dtype, copy=True)
                if counts_here(parameter, self.world):
                    written += values.numel()
                    for piece in known[sharding_of(parameter).name]:
                        self._write_piece(files, places[piece.theirs], piece, parameter, values)
        return written

    def _write_piece(
        self, files: _Files, place: TensorPlace, piece: Piece, parameter: nn.Parameter, values: Tensor
    ) -> None:
        """Those of ``values``, this rank's part of ``parameter``, that are in one of their tensors."""
        origin = [where.start for where in full_index(parameter)]
        for match in matches(piece, Rectangle(tuple(origin), tuple(values.shape))):
            inside = values[match.ours.moved([-start for start in origin]).index]
            block = inside.reshape(match.ours.sizes[-len(place.shape) :])
            for part, rectangle in _in_parts(block.t() if piece.transposed else block, match.theirs):
                files.write(place, runs(place.shape, rectangle), part.cpu().contiguous())

    def _check_absent(self) -> None:
        if self.world.is_first and self.directory.exists():
            raise HuggingFaceError("it exists; give a directory that is not there yet, or move it away")

    def _remove(self) -> None:
        if self.world.is_first:
            shutil.rmtree(self.partial, ignore_errors=True)

    def finish(self, tokenizer_from: Path | None, end_of_text: int | None) -> None:
        """[3] What describes the files, then the name."""
        if not self.world.is_first:
            return
        tokens: dict[str, Any] = {}
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, self.partial)
            tokens = _tokens(tokenizer_from)
        if tokens.get("eos_token_id") is None:
            tokens["eos_token_id"] = end_of_text
        name = str(self.dtype).removeprefix("torch.")
        _write_json(
            self.partial / CONFIG, config_to_json(self.config, self.family, dtype=name, tokens=tokens)
        )
        if len(self.files) > 1:
            _write_json(self.partial / INDEX, index_json(self.files, self.dtype.itemsize))
        sync_directory(self.partial)
        self.partial.rename(self.directory)
        sync_directory(self.directory.parent)

    def check_whole(self, written: list[int]) -> None:
        """That all ranks together wrote every element once: parts may be missing, or the axis not the right one."""
        found, wanted = sum(written), count_parameters(self.config)
        if found == wanted:
            return
        self.together(self._remove)
        raise HuggingFaceError(
            f"the parts that were given hold {found} of the {wanted} elements of the model (each counted once over "
            f"{self.world!r}); give the modules of all stages, after a Pipeline was "
            "made of them, and world=mesh.world where ranks share the model"
        )

    def together(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result; the first rank's error, if there is one, raised by all."""
        result, problem = None, None
        try:
            result = action()
        except (OSError, HuggingFaceError) as error:
            problem = str(error)
        both = gather_values([result, problem], self.world)
        for rank, (_, text) in zip(self.world.ranks, both, strict=True):
            if text is not None:
                whose = "" if self.world.size == 1 else f" (on rank {rank})"
                raise HuggingFaceError(f"{self.directory} cannot be written{whose}: {text}")
        return [one for one, _ in both]


class _Files:
    """Files that many ranks write to, each its own bytes; on disk when the block ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, int] = {}

    def write(self, place: TensorPlace, where: Iterator[tuple[int, int]], values: Tensor) -> None:
        """``values``, contiguous on the CPU, run by run."""
        if place.file not in self._open:
            self._open[place.file] = os.open(self._directory / place.file, os.O_WRONLY)
        width, size = values.element_size(), values.numel() * values.element_size()
        raw = memoryview((ctypes.c_char * size).from_address(values.data_ptr())).cast("B")
        done = 0
        for first, count in where:
            end = done + count * width
            _write_all(self._open[place.file], raw[done:end], place.offset + first * width)
            done = end

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._open.values():
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _write_all(descriptor: int, raw: memoryview, offset: int) -> None:
    """One call writes at most 2 GiB, or less where a signal comes."""
    while raw:
        count = os.pwrite(descriptor, raw, offset)
        raw, offset = raw[count:], offset + count


def _in_parts(block: Tensor, rectangle: Rectangle) -> Iterator[tuple[Tensor, Rectangle]]:
    """A block and where it goes, some rows at a time."""
    row = max(1, block[0].numel() * block.element_size()) if len(block) else 1
    step = max(1, _PART // row)
    for start in range(0, len(block), step):
        part = block[start : start + step]
        offsets = (rectangle.offsets[0] + start, *rectangle.offsets[1:])
        yield part, Rectangle(offsets, (len(part), *rectangle.sizes[1:]))


def _tokens(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG).is_file():
        return {}
    values = read_json(directory / CONFIG)
    return {name: values[name] for name in TOKENS if name in values}


def _write_json(path: Path, values: object) -> None:
    write_atomically(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
