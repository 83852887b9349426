"""The axes of one optimizer: what gradients are reduced over, shards are cut over, and the model lies on."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.comm import Axis, Mesh

__all__ = ["Axes", "check_axes", "shard_axis"]


@dataclass(frozen=True)
class Axes:
    """What an optimizer is spread over, as this rank sees it."""

    data: Axis
    """Gradients are reduced over it."""
    shard: Axis
    """The part of ``data`` that holds each element once: all of it, or one replica."""
    model: Axis
    """The model itself is spread over it: tensor and pipeline ranks together."""

    def of(self, reduced: Axis | None) -> tuple[Axis, Axis]:
        """What gradients of a unit are reduced over, and the part of it that holds each element once.

        ``reduced``: see :class:`~shardweave.comm.Sharding`; ``None``: ``data`` and ``shard``.
        """
        if reduced is None:
            return self.data, self.shard
        copies = self.data.size // self.shard.size
        return reduced, reduced if copies == 1 else reduced.blocks(reduced.size // copies)


def check_axes(**given: object) -> None:
    """TypeError: something else than an axis was given as one; it is named, with what was probably meant."""
    for name, axis in given.items():
        if isinstance(axis, Axis) or (axis is None and name != "data"):
            continue
        found = type(axis).__name__
        meant = f"{name}=mesh.{name}" if isinstance(axis, Mesh) else "an axis of a shardweave.comm.Mesh"
        raise TypeError(f"{name} is a {found}: give {meant}, or Axis.single() where there is one process")


def shard_axis(data: Axis, shard: Axis | None) -> Axis:
    """The axis to shard over: ``data`` itself, or ``shard`` after checking that it is one block of ``data``.

    ValueError: ``shard`` is no block of consecutive data ranks, or the mesh did not prepare the data axis for it.
    """
    if shard is None or shard.size == data.size:
        return data
    first = data.rank // shard.size * shard.size
    if data.size % shard.size or data.ranks[first : first + shard.size] != shard.ranks:
        raise ValueError(
            f"shard={shard!r} is not one of equal blocks of data={data!r}; pass shard=mesh.shard of a mesh built with "
            "replicas"
        )
    levels = data.background.levels if data.background is not None else None
    if levels is None or levels.local.ranks != shard.ranks:
        raise ValueError(
            f"data={data!r} is not prepared for replicas of {shard.size} ranks; build the mesh with "
            f"Mesh(..., replicas={data.size // shard.size})"
        )
    return shard
