"""What stage 3 would gather together, known before anything is allocated or any rank started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardweave.comm import Axis

from .layout import plan
from .module_units import UnitChoice, module_limit, module_units, unit_numbers

__all__ = ["GatheredUnit", "plan_gathering"]


@dataclass(frozen=True)
class GatheredUnit:
    """Parameters that stage 3 gathers and releases together."""

    modules: tuple[str, ...]
    """The modules at whose forward they are gathered, as in ``named_modules()``; ``""``: the root, all along."""
    parameters: tuple[str, ...]
    """As in ``named_parameters()``, in the order of the buffer."""
    elements: int
    """Of this rank, with the padding to a multiple of the shards: what counts against ``max_live_parameters``."""
    tree: int = 0
    """Of several modules, the one that it is in."""


def plan_gathering(
    module: nn.Module | Sequence[nn.Module],
    *,
    shards: int,
    bucket_mb: float | None = None,
    units: UnitChoice | None = None,
    data: Axis | None = None,
) -> tuple[GatheredUnit, ...]:
    """The units that ``ZeroOptimizer(stage=3, module=module)`` makes of a module, in forward order.

    The module may be on the meta device, and may be several, as for the optimizer. ``shards``: ranks that it would be
    sharded over. ``bucket_mb``, ``units``: as for :class:`ZeroOptimizer`. ``data``: its axis, where records of the
    module name a part of that, as those of experts over ``mesh.ep`` do; what only one rank has is not gathered and not
    among the units.

    ValueError: for a choice of ``units`` that does not fit the module.
    """
    roots = [module] if isinstance(module, nn.Module) else list(module)
    named: dict[nn.Parameter, str] = {}
    tree: dict[int, int] = {}  # of a parameter: the first that it is in
    for number, root in enumerate(roots):
        for name, parameter in root.named_parameters():
            if parameter.is_floating_point():
                named.setdefault(parameter, name)
                tree.setdefault(id(parameter), number)
    names, parameters = list(named.values()), list(named)
    parts = module_units(roots, parameters, limit=module_limit(bucket_mb), choice=units)
    home = {id(parameter): part for part in parts for parameter in part.parameters}
    plans = plan(
        parameters,
        names,
        data=data or Axis.single("dp"),
        shards=shards,
        bucket_mb=bucket_mb,
        groups=unit_numbers(parts, parameters),
    )
    return tuple(
        GatheredUnit(
            tuple(dict.fromkeys(home[id(parameters[slot.index])].name for slot in one.slots)),
            tuple(names[slot.index] for slot in one.slots),
            one.length,
            tree[id(parameters[one.slots[0].index])],
        )
        for one in plans
        if one.shards > 1 or shards == 1
    )
