"""Writing a checkpoint, by all ranks together."""

from __future__ import annotations

import json
import os
import shutil
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardweave.comm import Axis, gather_values

from ..optimizer import ZeroOptimizer
from . import folder
from .contents import contents_of, merge_groups, merge_scalars
from .errors import CheckpointWriteError
from .manifest import Manifest
from .placed import Placed, PlacedTensors
from .plain import to_plain
from .residuals import residual_tensors
from .streams import capture_streams

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["extra_tensors", "save_checkpoint", "stream_tensors"]


@torch.no_grad()
def save_checkpoint(
    path: str | Path,
    optimizer: ZeroOptimizer,
    *,
    world: Axis,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | Placed] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
) -> None:
    """Writes parameters, masters, optimizer state and random streams as a checkpoint that knows no layout.

    Collective over ``world``, the axis of all ranks that train (``mesh.world``). ``path``: the checkpoint's directory,
    on a file system that all of them see; it appears whole, with its marker, or not at all, and replaces one that was
    there. ``values``: what else a run has to remember (step, scheduler, data position), as JSON; the first rank's are
    saved. ``tensors``: further ones by name; a plain tensor is the same on all ranks (a module's buffers). Streams:
    Python's, NumPy's and torch's global ones are saved for each rank; ``generators``: further ones by name.

    When it returns, everything is on disk. Each file is written by one rank, and what several ranks hold is
    spread over them. Parameters need names: ``shardweave.comm.name_parameters``.

    ValueError, on all ranks: between ``backward`` and ``step``, a parameter without a name, state that is neither one
    number nor one for each element, ``values`` that JSON cannot hold, a ``path`` with other things in it.
    CheckpointWriteError, on all ranks: the file system refused.
    """
    path = Path(os.path.abspath(path))
    contents = contents_of(optimizer)
    contents.problems += _problems_of_first(path, values or {}) if world.is_first else []
    told = gather_values(
        {"problems": contents.problems, "scalars": contents.scalars, "groups": contents.groups}, world
    )
    problems = list(dict.fromkeys(problem for one in told for problem in one["problems"]))
    if problems:
        raise ValueError(f"{path} cannot be saved: " + "; ".join(problems[:5]))
    rest = Manifest(
        tensors={},
        files={},
        scalars=merge_scalars(one["scalars"] for one in told),
        groups=merge_groups(one["groups"] for one in told),
        optimizer=optimizer.counters(),
        ranks=world.size,
        values=values or {},
    )
    placed = {
        **contents.tensors,
        **residual_tensors(optimizer),
        **extra_tensors(tensors or {}),
        **stream_tensors(capture_streams(generators or {}), world.rank),
    }
    _make_directory(path, world)
    try:
        write(path, placed, rest, world)
    except CheckpointWriteError:
        if world.is_first:  # gives the space back; an earlier checkpoint is not touched
            shutil.rmtree(folder.partial_path(path), ignore_errors=True)
        raise


def write(path: Path, tensors: PlacedTensors, rest: Manifest, world: Axis) -> None:
    """Lets DCP plan and write into the partial directory, which is there; the first rank makes it whole."""
    from torch.distributed.checkpoint.api import CheckpointException  # here: see `loading._read`
    from torch.distributed.checkpoint.state_dict_saver import save

    from .planning import PlacedSavePlanner
    from .storage import Writer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is uninitialized": one process is no mistake
            save(
                {},
                storage_writer=Writer(path, world.rank, rest),
                planner=PlacedSavePlanner(tensors),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except CheckpointException as failed:
        raise CheckpointWriteError(f"{path} could not be written: {failures(failed, world)}") from None


def failures(failed: CheckpointException, world: Axis) -> str:
    """What went wrong on which rank, in one sentence; for our own faults with where it was raised."""
    said: dict[str, list[int]] = {}
    for position, (error, trace) in sorted(failed.failures.items()):
        text = str(error) if isinstance(error, OSError | ValueError) else _full(error, trace)
        said.setdefault(text, []).append(world.ranks[position])
    texts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()
    ]
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def extra_tensors(tensors: Mapping[str, Tensor | Placed]) -> dict[str, Placed]:
    """The caller's tensors under names that no parameter has."""
    return {
        f"extra/{name}": tensor if isinstance(tensor, Placed) else Placed.whole(tensor.detach())
        for name, tensor in tensors.items()
    }


def stream_tensors(streams: Mapping[str, Tensor], rank: int) -> dict[str, Placed]:
    """A rank's random streams under its name."""
    return {f"random/{rank:05d}/{name}": Placed.whole(state) for name, state in streams.items()}


def _problems_of_first(path: Path, values: Mapping[str, Any]) -> list[str]:
    """What the first rank, which writes the index, can tell before anything is touched."""
    found = []
    try:
        folder.recover(path)
        found += [problem] if (problem := folder.why_not_replaceable(path)) else []
    except (OSError, ValueError) as error:
        found.append(str(error))
    try:
        json.dumps(to_plain(values), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        found.append(f"values: {error}; give numbers, text, lists and dicts, as JSON holds them")
    return found


def _make_directory(path: Path, world: Axis) -> None:
    problem = None
    if world.is_first:
        partial = folder.partial_path(path)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            problem = f"{partial} cannot be made: {error.strerror}"
    problem = gather_values(problem, world)[0]
    if problem:
        raise CheckpointWriteError(problem)


def _full(error: BaseException, trace: Any) -> str:
    lines = traceback.format_list(trace) if trace is not None else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
