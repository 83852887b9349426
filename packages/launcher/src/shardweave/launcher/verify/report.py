"""All ranks' differences put together: the largest of each kind, and what parts, in causal order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardweave.comm import Mesh, gather_values
from shardweave.launcher.assembly import layout_of_mesh
from shardweave.launcher.config import Config
from shardweave.launcher.layout import Layout
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.verify.difference import Difference
from shardweave.launcher.verify.places import KINDS, Kind, causal_order
from shardweave.models import parameter_shapes

__all__ = ["Parting", "Report", "gather_report"]

_MOST = 50
"""Partings that are kept: what follows the first is mostly its consequence."""


@dataclass(frozen=True)
class Parting:
    """Something that parts, on all ranks where it does."""

    difference: Difference
    """On the rank where it is largest."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """What comparing a layout with one process found; the same on every rank."""

    layout: Layout
    precision: str
    steps: int
    largest: tuple[Difference, ...]
    """Of each kind that was compared, in the order in which a step computes them."""
    partings: tuple[Parting, ...]
    """In causal order; at most 50."""

    @property
    def equal(self) -> bool:
        """Whether every rank computes what one process does, but for rounding."""
        return not self.partings

    @property
    def trivial(self) -> bool:
        """Whether the layout is one process itself."""
        return self.layout.world_size == 1

    @property
    def first(self) -> Parting | None:
        """Where they part."""
        return self.partings[0] if self.partings else None

    def where(self, rank: int) -> str:
        """A rank with its coordinates: ``rank 5 (pp1 dp0 tp1)``."""
        return f"rank {rank} ({_coordinates(self.layout, rank)})"

    def headline(self) -> str:
        """The verdict in a sentence or two."""
        if self.first is None:
            same = (
                "is one process; it was compared with itself"
                if self.trivial
                else "trains as one process does"
            )
            return f"equal: {self.layout} {same}"
        found = self.first.difference
        others = len(self.first.ranks) - 1
        also = f" and {others} more: ranks {', '.join(map(str, self.first.ranks))}" if others else ""
        remark = f"; {found.remark}" if found.remark else ""
        return f"parts in {found}, on {self.where(found.rank)}{also}{remark}"

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "equal": self.equal,
            "trivial": self.trivial,
            "layout": self.layout.sizes(),
            "ranks": self.layout.world_size,
            "precision": self.precision,
            "steps": self.steps,
            "headline": self.headline(),
            "largest": [self._plain(difference) for difference in self.largest],
            "partings": [
                self._plain(parting.difference) | {"ranks": list(parting.ranks)} for parting in self.partings
            ],
        }

    def _plain(self, difference: Difference) -> dict[str, Any]:
        place = {"coordinates": self.layout.coordinates(difference.rank)}
        return {key: _number(value) for key, value in difference.plain().items()} | place

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Report:
        """The report that `plain` came from."""
        sizes = plain["layout"]
        layout = Layout(
            data=sizes["dp"],
            tensor=sizes["tp"],
            pipeline=sizes["pp"],
            context=sizes["cp"],
            expert=sizes["ep"],
        )
        partings = (Parting(_difference(item), tuple(item["ranks"])) for item in plain["partings"])
        largest = (_difference(item) for item in plain["largest"])
        return cls(layout, plain["precision"], plain["steps"], tuple(largest), tuple(partings))


def gather_report(config: Config, mesh: Mesh, differences: Sequence[Difference], steps: int) -> Report:
    """The report over all ranks' `differences`; collective."""
    shape = transformer_config(config)
    names = [entry.name for entry in parameter_shapes(shape)]

    def order(difference: Difference) -> tuple[int, ...]:
        return causal_order(difference.step, difference.kind, difference.name, shape.layers, names)

    # Of each rank only its largest and its first: what is first of all is first on its rank.
    apart = sorted((difference for difference in differences if difference.parts), key=order)
    mine = {
        "largest": [found.plain() for found in _largest(differences)],
        "apart": [found.plain() for found in apart[:_MOST]],
    }
    rows = gather_values(mine, mesh.world)
    largest = _largest(Difference.of(item) for row in rows for item in row["largest"])
    everywhere = sorted((Difference.of(item) for row in rows for item in row["apart"]), key=order)
    return Report(
        layout_of_mesh(mesh), config.precision, steps, tuple(largest), tuple(_merged(everywhere))[:_MOST]
    )


def explained(report: Report, norm: Mapping[int, str]) -> Report:
    """The report with a remark for a norm that parts although the step's gradients agree. `norm`: by step."""
    found = report.first
    if found is None or found.difference.kind != "norm":
        return report
    difference = replace(found.difference, remark=norm[found.difference.step])
    return replace(report, partings=(replace(found, difference=difference), *report.partings[1:]))


def _largest(differences: Iterable[Difference]) -> list[Difference]:
    """Of each kind the one that is farthest off, as a share of what is allowed."""
    found: dict[Kind, Difference] = {}
    for difference in differences:
        known = found.get(difference.kind)
        if known is None or _excess(difference) > _excess(known):
            found[difference.kind] = difference
    return [found[kind] for kind in KINDS if kind in found]


def _excess(difference: Difference) -> float:
    return difference.relative / difference.tolerance if difference.tolerance else difference.relative


def _merged(differences: Iterable[Difference]) -> list[Parting]:
    """Neighbours in causal order that are the same thing on several ranks."""
    groups: dict[tuple[int, Kind, str], list[Difference]] = {}
    for difference in differences:
        groups.setdefault((difference.step, difference.kind, difference.name), []).append(difference)
    return [
        Parting(max(group, key=_excess), tuple(sorted({found.rank for found in group})))
        for group in groups.values()
    ]


def _coordinates(layout: Layout, rank: int) -> str:
    places = layout.coordinates(rank)
    named = ["pp", "dp", "ep", "cp", "tp"] if layout.context > 1 else ["pp", "dp", "ep", "tp"]
    return " ".join(f"{axis}{places[axis]}" for axis in named if axis in places)


def _number(value: Any) -> Any:
    """NaN and infinity as text: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _difference(plain: Mapping[str, Any]) -> Difference:
    fields = {key: value for key, value in plain.items() if key not in ("coordinates", "ranks")}
    for key in ("relative", "tolerance", "scale", "ours", "reference"):
        fields[key] = float(fields[key])
    return Difference.of(fields)
