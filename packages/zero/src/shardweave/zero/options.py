"""The choices of :class:`ZeroOptimizer`, checked before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from shardweave.comm import Compression

from .loss_scale import LossScale
from .offload import Offload
from .precision import MixedPrecision

__all__ = ["Gathering", "Options"]

_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """How much of the parameters stage 3 gathers at a time. Elements are this rank's, of whole units, with padding."""

    prefetch: int = 1
    """Units that are gathered ahead of their use."""
    max_live_parameters: int | None = None
    """Elements gathered at once, at most; ``None``: no bound. It goes before prefetching and keeping."""
    keep_gathered: int = 0
    """Elements that may stay gathered from their first use in a step to its end, instead of being gathered again for
    the backward pass and for each micro-batch."""
    persistent_parameters: int = 0
    """Units of up to so many elements are gathered once a step, and stay."""

    def __post_init__(self) -> None:
        for name in ("prefetch", "keep_gathered", "persistent_parameters"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}={value!r}: give a whole number, 0 or more")
        limit = self.max_live_parameters
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ValueError(f"max_live_parameters={limit!r}: give a number of elements above 0, or None")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user chose, with defaults resolved. Raises ``ValueError`` for what is wrong or not built yet."""

    stage: Any
    clip: float | None
    precision: MixedPrecision
    offload: Offload
    bucket_mb: float | None
    shard_between_micro_batches: bool | None
    nonfinite: str
    reduction: str
    loss_scale: LossScale | None
    compression: Compression | None
    gathering: Gathering = Gathering()
    ownership: str = "element"
    whole_gradients_mb: float = 0

    def __post_init__(self) -> None:
        if self.stage not in _STAGES or isinstance(self.stage, bool):
            raise ValueError(f"stage={self.stage!r}: choose one of 0, 1, 2, 3")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                f"clip={self.clip!r}: give the largest allowed norm, above 0, or None for no clipping"
            )
        if not isinstance(self.precision, MixedPrecision):
            raise ValueError(f"precision={self.precision!r}: give a MixedPrecision(...)")
        if not isinstance(self.offload, Offload):
            raise ValueError(f"offload={self.offload!r}: give a member of Offload, e.g. Offload.NONE")
        if self.offload is not Offload.NONE:
            raise ValueError(f"offload=Offload.{self.offload.name} is not built yet; use Offload.NONE")
        if self.bucket_mb is not None and not (self.bucket_mb > 0 and math.isfinite(self.bucket_mb)):
            raise ValueError(
                f"bucket_mb={self.bucket_mb!r}: give a size in MiB above 0, or None for one by size"
            )
        if self.shard_between_micro_batches and self.stage < 2:
            raise ValueError(
                f"shard_between_micro_batches=True has no effect with stage={self.stage}, which keeps gradients "
                f"whole; use stage=2, or leave it out"
            )
        if not (self.whole_gradients_mb >= 0 and math.isfinite(self.whole_gradients_mb)):
            raise ValueError(f"whole_gradients_mb={self.whole_gradients_mb!r}: give a size in MiB, 0 or more")
        if self.whole_gradients_mb and (self.stage < 2 or self.shard_between_micro_batches is not None):
            because = (
                f"stage={self.stage}, which keeps gradients whole"
                if self.stage < 2
                else f"shard_between_micro_batches={self.shard_between_micro_batches}, which says it"
            )
            raise ValueError(
                f"whole_gradients_mb={self.whole_gradients_mb!r} has no effect with {because}; leave one of them out"
            )
        if self.stage < 3 and self.gathering != Gathering():
            raise ValueError(
                f"prefetch, max_live_parameters, keep_gathered and persistent_parameters have no effect with "
                f"stage={self.stage}, where every rank has all parameters; use stage=3, or leave them out"
            )
        if self.nonfinite not in ("skip", "stop", "ignore"):
            raise ValueError(f"nonfinite={self.nonfinite!r}: choose one of 'skip', 'stop', 'ignore'")
        if self.ownership not in ("element", "tensor"):
            raise ValueError(
                f"ownership={self.ownership!r}: choose 'element', where shards are cut anywhere, or 'tensor', where "
                "each parameter is one rank's"
            )
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={self.reduction!r}: choose 'mean' or 'sum'")
        if not (self.loss_scale is None or isinstance(self.loss_scale, LossScale)):
            raise ValueError(
                f"loss_scale={self.loss_scale!r}: give LossScale(...), e.g. LossScale(initial=2.0**12), or None"
            )
        if self.loss_scale is not None and self.nonfinite == "ignore":
            raise ValueError(
                "nonfinite='ignore' with loss_scale: the scale is found by skipping the steps that overflow; use "
                "nonfinite='skip' or 'stop', or no loss_scale"
            )

        if not (self.compression is None or isinstance(self.compression, Compression)):
            raise ValueError(
                f"compression={self.compression!r}: give one of shardweave.comm's, e.g. OneBit(), or None"
            )
        if self.compression is not None and self.shard_between_micro_batches:
            raise ValueError(
                "shard_between_micro_batches=True with compression: what a step sends is compressed once, after its "
                "last micro-batch; leave the option out"
            )
        if self.compression is not None and self.precision.reduction is not None:
            raise ValueError(
                f"MixedPrecision(reduction={self.precision.reduction}) has no effect with compression, which has its "
                "own format on the wire; leave one of them out"
            )

    def in_words(self) -> list[str]:
        """Each of them, to compare ranks."""
        return [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self)]

    def eager(self, whole_bytes: int) -> bool:
        """Whether each micro-batch is reduced, so that no whole gradient outlives it.

        ``whole_bytes``: what they would take. Stages 2 and 3 are chosen for their memory, so there that is the default,
        unless they are small enough; compression sends a step's gradient once.
        """
        if self.stage < 2 or self.compression is not None:
            return False
        if self.shard_between_micro_batches is not None:
            return self.shard_between_micro_batches
        return whole_bytes > self.whole_gradients_mb * 2**20
