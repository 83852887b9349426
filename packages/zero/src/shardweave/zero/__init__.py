"""Sharded optimizers (ZeRO) for any module and any elementwise ``torch.optim`` class.

=========================  ==================================================================================
:class:`ZeroOptimizer`     a ``torch.optim.Optimizer``: stages 0 to 3, accumulation, global norm, clipping
:class:`MixedPrecision`    formats of parameters, gradients, wire and masters; :class:`Formats`: those in force
:class:`LossScale`         for float16: how the loss scale begins and moves
:class:`Offload`           where the shard lives
:class:`ShardPiece`        what a rank keeps and updates of one parameter
:func:`decay_groups`       parameter groups: decay for matrices only
:func:`plan_units`         which parameters share a flat buffer: :class:`UnitPlan`, :class:`Slot`
:func:`plan_gathering`     what stage 3 gathers together: :class:`GatheredUnit`
:func:`even_batches`       as many turns of a loop on every rank, whoever has how many batches
=========================  ==================================================================================
"""

from __future__ import annotations

from ._version import __version__
from .batches import Turn, even_batches
from .groups import decay_groups
from .loss_scale import LossScale
from .offload import Offload
from .optimizer import ZeroOptimizer
from .plan_gathering import GatheredUnit, plan_gathering
from .precision import Formats, MixedPrecision
from .shards import ShardPiece
from .units import Member, Slot, UnitKey, UnitPlan, plan_units

__all__ = [
    "Formats",
    "GatheredUnit",
    "LossScale",
    "Member",
    "MixedPrecision",
    "Offload",
    "ShardPiece",
    "Slot",
    "Turn",
    "UnitKey",
    "UnitPlan",
    "ZeroOptimizer",
    "__version__",
    "decay_groups",
    "even_batches",
    "plan_gathering",
    "plan_units",
]
