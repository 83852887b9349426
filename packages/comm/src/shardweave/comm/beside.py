"""Collectives of several rounds that run on an axis' background, beside the computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .axis import Axis
from .background import Background
from .books import entry_of
from .pending import Pending
from .two_level import reduce_to_local
from .wires import NOTHING, Sent

__all__ = ["launch_beside", "start_reduce_to_shard"]


def launch_beside(
    kind: str,
    axis: Axis,
    background: Background,
    tensor: Tensor,
    work: Callable[[], Sent],
    result: Tensor,
    **options: Any,
) -> Pending[Tensor]:
    """Puts ``work`` on the stream as one collective of ``axis``, watched and counted like the others.

    ``tensor``: what is reduced; ``work`` returns what it sent; ``result``: what the handle gives. ``options``: what
    the members have to see alike, for the debug mode.
    """
    guard = axis.guard
    ticket = None if guard is None else guard.launch(axis, kind, tensor, tensor.shape, options)
    sent = [NOTHING]

    def run() -> None:
        sent[0] = work()

    entry = entry_of(axis, kind, tensor, tensor.numel(), lambda: sent[0])
    return Pending([background.stream.launch(run)], lambda: result, entry=entry, ticket=ticket)


def start_reduce_to_shard(tensor: Tensor, axis: Axis, *, out: Tensor, op: str) -> Pending[Tensor]:
    """This rank's shard of the sum or mean over ``axis``, where each replica holds all shards.

    ``axis``: the data axis of a mesh with replicas. ``tensor``: 1-D, contiguous, as many equal parts as a replica has
    ranks (``mesh.shard.size``); ``out``: this rank's part, perhaps wider. First the ranks of a replica add up part by
    part, then the replicas: only that crosses from one to another, 1 / ``mesh.shard.size`` of the bytes per rank.
    """
    background = axis.background
    if background is None or background.levels is None:
        raise ValueError(f"{axis!r} has no replicas; build the mesh with Mesh(..., replicas=N)")
    levels = background.levels
    if tensor.numel() != out.numel() * levels.local.size or op not in ("sum", "mean"):
        raise ValueError(
            f"reduce_to_shard, {op}: {tensor.numel()} elements for {levels.local.size} shards of {out.numel()}; the "
            "tensor has to be as long as all shards together, and the operation sum or mean"
        )
    flat = tensor.detach().view(-1)
    return launch_beside(
        "reduce_to_shard",
        axis,
        background,
        flat,
        lambda: reduce_to_local(flat, out, levels, op),
        out,
        operation=op,
        into=out.dtype,
    )
