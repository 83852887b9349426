"""Reading a checkpoint into whatever layout is running now, by all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardweave.comm import Axis, all_reduce, broadcast_value, gather_values
from shardweave.comm.devices import local_device

from ..optimizer import ZeroOptimizer
from . import folder
from .errors import CheckpointError, CheckpointMismatch
from .manifest import Manifest
from .placed import Placed, PlacedTensors
from .receiving import Request, request_of
from .residuals import PREFIX as RESIDUAL
from .residuals import ResidualLoader
from .saving import extra_tensors, failures, stream_tensors
from .streams import capture_streams, reseed_streams, restore_streams

__all__ = ["Loaded", "load_checkpoint", "read_manifest_together"]

_LISTED = 8

_OF_LAYOUTS = ("random/", f"{RESIDUAL}/")
"""What another layout, or a run without compression, has no use for."""


@dataclass(frozen=True)
class Loaded:
    """What a load found, the same on all ranks."""

    values: Mapping[str, Any]
    """The ``values`` that were saved."""
    missing: tuple[str, ...] = field(default=())
    """Tensors that this run has and the checkpoint does not; they are as they were."""
    unexpected: tuple[str, ...] = field(default=())
    """Tensors of the checkpoint that no rank of this run has."""


@torch.no_grad()
def load_checkpoint(
    path: str | Path,
    optimizer: ZeroOptimizer,
    *,
    world: Axis,
    tensors: Mapping[str, Tensor | Placed] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    strict: bool = True,
    patience: float = 5.0,
) -> Loaded:
    """Puts module and optimizer where :func:`save_checkpoint` left off, on any layout; collective over ``world``.

    ``tensors`` are written in place. Random streams go on where they were on the same number of ranks; on another
    number they are seeded anew, each rank its own. ``strict``: a tensor that one side lacks is an error; otherwise the
    lists are returned. ``patience``: seconds to wait for files that a network file system does not show yet.

    Everything that can be known from the index is checked before the first element is changed. One rank's error is
    everybody's, in the same words.

    CheckpointError: the checkpoint is not whole or damaged; when that shows while reading, parameters are partly
    those of the checkpoint and have to be loaded from another one. CheckpointMismatch: it is of other tensors,
    shapes or types, or of another optimizer; nothing is changed.
    """
    path = Path(path)
    optimizer.take_in_unfrozen()
    manifest = read_manifest_together(path, world)
    streams = capture_streams(generators or {})
    request = request_of(optimizer, manifest, strict=strict)
    request.add(extra_tensors(tensors or {}))
    same_ranks = manifest.ranks == world.size
    request.add_optional(stream_tensors(streams, world.rank if same_ranks else 0))
    missing, unexpected = _agree(request, manifest, world, path, strict)
    _read(path, request.found, manifest, world, patience)
    residuals = ResidualLoader(optimizer, manifest)
    if world.is_first and residuals.forgotten:
        warnings.warn(
            f"{path} holds what compressed gradients had not sent yet, and this run does not compress: it is left out",
            stacklevel=2,
        )
    for arriving in residuals.rounds():
        _read(path, arriving, manifest, world, patience)
    request.finish(optimizer)
    residuals.finish()
    optimizer.publish()
    if same_ranks:
        restore_streams(streams, generators or {})
    else:
        reseed_streams(streams, generators or {}, world.rank)
    return Loaded(manifest.values, missing, unexpected)


def read_manifest_together(path: Path, world: Axis) -> Manifest:
    """The index as the first rank sees it, on all ranks: one reader, one decision.

    CheckpointError, on all ranks: there is no whole checkpoint at ``path``, as the first rank sees it.
    """
    text, problem = None, None
    if world.is_first:
        try:
            folder.recover(path)
            text = folder.read_index(path).decode(errors="surrogateescape")
        except (CheckpointError, OSError) as error:
            problem = str(error)
    text, problem = broadcast_value([text, problem], world)
    if problem is not None:
        raise CheckpointError(problem)
    return Manifest.from_json(str(text).encode(errors="surrogateescape"), str(path / folder.INDEX))


def _agree(
    request: Request, manifest: Manifest, world: Axis, path: Path, strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Missing and unexpected tensors over all ranks; raises what any of them has to complain about."""
    told = gather_values({"missing": request.missing, "problems": request.problems}, world)
    problems = list(dict.fromkeys(problem for one in told for problem in one["problems"]))
    missing = tuple(sorted({name for one in told for name in one["missing"]}))
    names = [name for name in sorted(manifest.tensors) if not name.startswith(_OF_LAYOUTS)]
    wanted = torch.tensor([name in request.named for name in names], dtype=torch.int32, device=local_device())
    if names:
        wanted = all_reduce(wanted, world, "max")
    unexpected = tuple(name for name, is_wanted in zip(names, wanted.tolist(), strict=True) if not is_wanted)
    if strict and missing:
        problems.append(f"it does not have {_listed(missing)}")
    if strict and unexpected:
        problems.append(f"this run does not have {_listed(unexpected)}")
    if problems:
        raise CheckpointMismatch(f"{path} does not fit: " + "; ".join(problems[:_LISTED]))
    return missing, unexpected


def _read(path: Path, tensors: PlacedTensors, manifest: Manifest, world: Axis, patience: float) -> None:
    # Imported here, as in all of this package: DCP takes a second that whoever only looks at checkpoints need not wait.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from .planning import PlacedLoadPlanner
    from .storage import Reader

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is uninitialized": one process is no mistake
            load(
                {},
                storage_reader=Reader(path, manifest, patience=patience),
                planner=PlacedLoadPlanner(tensors),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except CheckpointException as failed:
        raise CheckpointError(failures(failed, world)) from None


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
