"""Writing a checkpoint, by all ranks together."""

from __future__ import annotations

import copy
import json
import os
import shutil
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
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
    from torch.distributed.checkpoint.metadata import Metadata

    from .storage import Buffers, Staged, Stager

__all__ = ["Job", "begin", "extra_tensors", "failures", "save_checkpoint", "stream_tensors"]

_LOOK_EVERY = 0.05  # seconds between looks for the notes of other ranks


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

    When it returns, everything is on disk; :class:`CheckpointWriter` writes while training goes on. Each file is
    written by one rank, and what several ranks hold is spread over them. Parameters need names:
    ``shardweave.comm.name_parameters``.

    ValueError, on all ranks: between ``backward`` and ``step``, a parameter without a name, state that is neither one
    number nor one for each element, ``values`` that JSON cannot hold, a ``path`` with other things in it.
    CheckpointWriteError, on all ranks: the file system refused.
    """
    job = begin(path, optimizer, world, None, values or {}, tensors or {}, generators or {})
    job.work()
    job.settle()


class Job:
    """One rank's part of one checkpoint, from its planned chunks to the marker.

    :meth:`work` is what may happen behind the training: it calls no other rank. The ranks hear of each other through
    notes beside the files, so nothing of it meets the collectives of the steps that go on.
    """

    def __init__(
        self, path: Path, world: Axis, staged: Staged, metadata: Metadata | None, rest: Manifest
    ) -> None:
        self.path, self._world, self._staged = path, world, staged
        self._metadata, self._rest = metadata, rest
        self._written = threading.Event()
        self._problem: str | None = None
        self._given_up = threading.Event()
        self._whole = threading.Event()

    @property
    def whole(self) -> bool:
        """Whether the checkpoint is known to be whole; on the first rank only, elsewhere after :meth:`settle`."""
        return self._whole.is_set()

    def write(self) -> None:
        """This rank's file and its note."""
        try:
            folder.leave_note(self.path, self._world.rank, self._staged.write(self.path, self._world.rank))
        except Exception as error:
            self._problem = _said(error)
        finally:
            self._written.set()

    def commit(self) -> None:
        """The first rank waits for all notes and makes the checkpoint whole."""
        from .storage import manifest_of

        assert self._metadata is not None  # the first rank's
        try:
            notes = []
            for rank in range(self._world.size):
                while (note := folder.read_note(self.path, rank)) is None:
                    if self._given_up.wait(_LOOK_EVERY):
                        return
                notes.append(note)
            folder.commit(self.path, manifest_of(self._metadata, self._rest, notes))
            self._whole.set()
        except Exception as error:
            self._problem = _said(error)

    def work(self) -> None:
        """All that is this rank's to do, in this thread. The first rank's ends when all ranks have written."""
        self.write()
        if self._world.size == 1 and self._problem is None:
            self.commit()

    def settle(self, behind: threading.Thread | None = None) -> None:
        """Waits until the checkpoint is whole; collective. ``behind``: the thread that is at it on the first rank.

        CheckpointWriteError, on all ranks: it could not be written; what there was of it is deleted.
        """
        self._written.wait()
        world = self._world
        problems = gather_values(self._problem, world)
        if (not any(problems) and world.size > 1) or behind is not None:
            if world.is_first:
                if any(problems):
                    self._given_up.set()
                if behind is not None:
                    behind.join()
                else:
                    self.commit()
            problems = gather_values(self._problem, world)
        if any(problems):
            if world.is_first:
                folder.remove_partial(self.path)
            raise CheckpointWriteError(f"{self.path} could not be written: {_by_rank(problems, world)}")
        self._whole.set()


@torch.no_grad()
def begin(
    path: str | Path,
    optimizer: ZeroOptimizer,
    world: Axis,
    buffers: Buffers | None,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor | Placed],
    generators: Mapping[str, torch.Generator],
) -> Job:
    """Plans a checkpoint and sets aside what this rank writes, in ``buffers`` if there are any; collective.

    Errors: those of :func:`save_checkpoint`.
    """
    path = Path(os.path.abspath(path))
    contents = contents_of(optimizer)
    contents.problems += _problems_of_first(path, values) if world.is_first else []
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
        optimizer=copy.deepcopy(optimizer.counters()),
        ranks=world.size,
        values=copy.deepcopy(dict(values)) if world.is_first else {},
    )
    placed = {
        **contents.tensors,
        **residual_tensors(optimizer),
        **extra_tensors(tensors),
        **stream_tensors(capture_streams(generators), world.rank),
    }
    _make_directory(path, world)
    try:
        stager = _plan(path, placed, buffers, world)
    except CheckpointWriteError:
        if world.is_first:
            folder.remove_partial(path)
        raise
    return Job(path, world, stager.staged, stager.metadata, rest)


def _plan(path: Path, tensors: PlacedTensors, buffers: Buffers | None, world: Axis) -> Stager:
    """Lets DCP plan, and set aside what this rank writes."""
    from torch.distributed.checkpoint.api import CheckpointException  # here: see `loading._read`
    from torch.distributed.checkpoint.state_dict_saver import save

    from .planning import PlacedSavePlanner
    from .storage import Stager

    stager = Stager(buffers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is uninitialized": one process is no mistake
            save(
                {},
                storage_writer=stager,
                planner=PlacedSavePlanner(tensors),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except CheckpointException as failed:
        raise CheckpointWriteError(f"{path} could not be written: {failures(failed, world)}") from None
    return stager


def failures(failed: CheckpointException, world: Axis) -> str:
    """What went wrong on which rank, in one sentence; for our own faults with where it was raised."""
    texts: list[str | None] = [None] * world.size
    for position, (error, trace) in failed.failures.items():
        texts[position] = str(error) if isinstance(error, OSError | ValueError) else _full(error, trace)
    return _by_rank(texts, world)


def _by_rank(of_ranks: Sequence[str | None], world: Axis) -> str:
    """What each rank has to say, in one sentence; None: nothing."""
    said: dict[str, list[int]] = {}
    for position, text in enumerate(of_ranks):
        if text is not None:
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


def _said(error: Exception) -> str:
    """Of an error on this rank; where it was raised only if it is our own fault."""
    if isinstance(error, OSError | ValueError):
        return str(error)
    return _full(error, traceback.extract_tb(error.__traceback__))


def _full(error: BaseException, trace: Any) -> str:
    lines = traceback.format_list(trace) if trace is not None else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
