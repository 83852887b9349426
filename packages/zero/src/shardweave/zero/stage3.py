"""Stage 3 put together: from a module to units that are gathered when it runs.

::

    module_units     which parameters are gathered together
    materialize      values for those that have none yet, unit by unit
    gathered         a unit's memory: whole while in use, else this rank's part
    residency        when it is gathered and released, as each member and
    member           ... tells who uses it, and use_order which follows which;
    module_hooks     who tells: modules that begin and end,
    guard            ... and parameters that are touched
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from shardweave.comm import Axis

from .gathered import GatheredParameters
from .member import Member
from .module_hooks import ModuleHooks
from .module_units import ModuleUnit
from .options import Gathering
from .residency import Residency
from .same_order import SameOrder
from .unit import Unit

__all__ = ["GatheredUnits"]


class GatheredUnits:
    """The units of one optimizer that are sharded between their uses.

    ``roots``: the modules that the parameters are in; ``parts``: what :func:`~.module_units.module_units` made of them;
    ``shard``: the ranks that a unit is sharded over.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        roots: Sequence[nn.Module],
        parts: Sequence[ModuleUnit],
        options: Gathering,
        shard: Axis,
    ) -> None:
        flats = [unit.flat for unit in units if isinstance(unit.flat, GatheredParameters)]
        home = {id(parameter): part for part in parts for parameter in part.parameters}
        homes = [{id(p): home[id(p)] for p in flat.parameters} for flat in flats]
        labels = [_label(list(of_unit.values())) for of_unit in homes]
        along = [
            number
            for number, of_unit in enumerate(homes)
            if any(part.module is root for part in of_unit.values() for root in roots)
        ]
        owners = [len({part.module for part in of_unit.values()}) for of_unit in homes]
        self.residency = Residency(flats, labels, owners, options, SameOrder(shard), along)
        owned: dict[nn.Module, list[Member]] = {}
        for member, of_unit in zip(self.residency.members, homes, strict=True):
            for module in dict.fromkeys(part.module for part in of_unit.values()):
                owned.setdefault(module, []).append(member)
        self._hooks = ModuleHooks(roots, owned, self.residency)
        self.residency.on_end = self._hooks.detach
        self._of_parameter = {
            id(parameter): member for member in self.residency.members for parameter in member.flat.parameters
        }

    @contextmanager
    def whole(self, module: nn.Module | None) -> Iterator[None]:
        """All parameters of ``module``, or all there are, are gathered inside; collective."""
        wanted = self.residency.members
        if module is not None:
            found = {id(parameter) for parameter in module.parameters()}
            wanted = tuple(member for member in wanted if any(id(p) in found for p in member.flat.parameters))
        with self.residency.whole(wanted):
            yield

    def updated(self) -> None:
        """The shards have other values: what was gathered is released, and persistent units are gathered again."""
        self.residency.forget()
        self.residency.gather_persistent()

    def reducing(self) -> None:
        """Gradients are about to be reduced, which takes all ranks as well."""
        self.residency.reducing()

    def waiting_to_reduce(self) -> AbstractContextManager[None]:
        """Around what ranks do together then."""
        return self.residency.waiting_to_reduce()

    def listen(self) -> None:
        """Something was frozen or unfrozen."""
        self._hooks.listen()

    def detach(self) -> None:
        """Everything is gathered and stays; nobody watches any more. Collective."""
        self.residency.end()


def _label(parts: Sequence[ModuleUnit]) -> str:
    names = dict.fromkeys(part.name or "the module itself" for part in parts)
    return " and ".join(names)
