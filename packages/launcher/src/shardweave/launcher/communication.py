"""From settings to what `comm` and `zero` take: how gradients travel, in how many copies, and over which mesh.

Pure but for `mesh_of`, which builds process groups. Where ranks are is not a matter of the configuration: see `nodes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardweave.comm import CommOptions, Compression, Mesh, OneBit, PowerSGD, TopK, Topology, TwoBit
from shardweave.launcher.config import Comm, Config
from shardweave.launcher.layout import Layout
from shardweave.launcher.problems import Problem
from shardweave.pipeline import RULES

__all__ = ["comm_options", "compression_of", "idle_over", "mesh_of", "num_replicas", "residual_bytes"]


def compression_of(settings: Comm) -> Compression | None:
    """How gradients are sent; None: as they are."""
    match settings.compression:
        case "onebit":
            return OneBit(warmup=settings.warmup)
        case "twobit":
            return TwoBit(warmup=settings.warmup)
        case "topk":
            return TopK(warmup=settings.warmup, density=settings.density)
        case "powersgd":
            return PowerSGD(warmup=settings.warmup, rank=settings.rank)
        case "none":
            return None


def comm_options(settings: Comm) -> CommOptions:
    """How the axes communicate."""
    return CommOptions(
        hierarchy=settings.hierarchy,
        background=settings.compression != "none",  # it takes several rounds, beside the backward pass
        shared_memory=settings.shared_memory,
        debug=settings.debug,
    )


def num_replicas(config: Config) -> int:
    """Into how many copies of shards the data axis is cut; 1 at stage 0, which shards nothing."""
    return config.zero.replicas if config.zero.stage > 0 else 1


def mesh_of(
    config: Config, layout: Layout, *, topology: Topology | None = None, timeout: float | None = None
) -> Mesh:
    """The mesh that a run trains on, over the initialised world; collective.

    `topology`: who shares a node; None: found out by the mesh. `timeout`: seconds; None: the configuration's.
    """
    return Mesh(
        dp=layout.data,
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        replicas=num_replicas(config),
        ep=layout.expert,
        timeout=config.comm.timeout if timeout is None else timeout,
        topology=topology,
        options=comm_options(config.comm),
    )


def idle_over(config: Config, layout: Layout) -> Iterator[Problem]:
    """The settings that do nothing over these ranks, as warnings; `rules.idle` has those of any number of ranks."""
    if config.comm.compression != "none" and layout.sharing == 1:
        yield Problem(
            ("comm", "compression"),
            f"`comm.compression: {config.comm.compression}` has no effect because there is one data rank: gradients "
            "are not sent",
        )
    own, chunks = RULES[config.parallel.schedule].chunks, config.parallel.chunks
    if layout.pipeline > 1 and own not in (None, 1) and chunks not in (1, own):
        yield Problem(
            ("parallel", "chunks"),
            f"`parallel.chunks: {chunks}` has no effect because `parallel.schedule: {config.parallel.schedule}` has "
            f"{own} stages per rank",
        )


def residual_bytes(config: Config, layout: Layout, elements: int) -> int:
    """What compression keeps on a rank that holds so many parameters, at most: over several nodes it is less.

    What was not sent, of this rank's part of a copy's gradients; with bits also of what it averages for the others, if
    more than two exchange, and the units that a warm-up learns. All of it twice, as a step that is skipped takes it
    back. The thin matrices of PowerSGD are not counted.
    """
    compression = compression_of(config.comm)
    if compression is None or layout.sharing == 1:
        return 0
    copies = num_replicas(config)
    workers, part = layout.sharing, elements
    if copies > 1:  # added up exactly inside a copy, and compressed between them
        workers, part = copies, math.ceil(elements * copies / layout.sharing)
    kept = part
    if isinstance(compression, (OneBit, TwoBit)):
        kept += math.ceil(part / workers) if workers > 2 else 0
        kept += part if compression.warmup else 0
    wide = 8 if "fp64" in (config.precision, config.zero.gradient_dtype) else torch.float32.itemsize
    return 2 * wide * kept
