"""What ranks gather at a time under ZeRO stage 3: arithmetic on the model that would be built, before any rank starts.

::

    in use all along     what is the part's own: its norms, and an embedding that is the head as well
    in use in turn       block after block, with the units that are gathered ahead (`zero.prefetch`)
    idle                 what is kept for the backward pass (`zero.keep_gathered`)

Of a rank with several stages one runs at a time, in the schedule's order; what is gathered ahead may be another's. A
schedule that puts weight gradients off leaves the parameters in use until then: all of the rank's, at worst.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from shardweave.comm import Axis, set_sharding, sharding_of
from shardweave.comm.grid import Grid
from shardweave.launcher.communication import num_replicas
from shardweave.launcher.config import Config
from shardweave.launcher.config import Zero as ZeroSettings
from shardweave.launcher.layout import Layout
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.staging import staging_of
from shardweave.models import Part, Transformer, TransformerConfig
from shardweave.zero import GatheredUnit, plan_gathering

__all__ = ["Gathered", "check_gathering", "gathered", "gathering_options"]

_PREFETCH = 1
"""Units, where nothing is said."""


@dataclass(frozen=True)
class Gathered:
    """Elements that one rank gathers."""

    most: int
    """At once."""
    least: int
    """That have to be there at once, whatever the settings."""
    largest: str
    """The module whose turn that is."""


def gathering_options(settings: ZeroSettings) -> dict[str, Any]:
    """What stage 3 was told, as the optimizer's arguments; below it these have no effect, which a warning says."""
    told = {name: getattr(settings, name) for name in ("prefetch", "max_live_parameters", "keep_gathered")}
    return {name: value for name, value in told.items() if value != "auto" and settings.stage == 3}


def check_gathering(config: Config, layout: Layout, shape: TransformerConfig) -> None:
    """Refuses a bound on what is gathered that cannot be kept.

    Raises:
        ConfigError: it is less than what one of the stages has in use at once.
    """
    limit = config.zero.max_live_parameters
    if limit == "auto" or not _is_sharded(config, layout):
        return
    staging = staging_of(config, layout, shape)
    needs = [gathered(config, layout, shape, staging.parts_of(rank)).least for rank in range(layout.pipeline)]
    rank = max(range(layout.pipeline), key=lambda rank: needs[rank])
    need = gathered(config, layout, shape, staging.parts_of(rank))
    if need.least > limit:
        stages = " or ".join(map(str, staging.stages_of(rank)))
        text = (
            f"`zero.max_live_parameters: {limit}` is less than the {need.least} that stage {stages} has in use at "
            f"once, when {need.largest} runs; use {need.least} or more, auto, or a smaller comm.bucket_mb"
        )
        raise ConfigError([Problem(("zero", "max_live_parameters"), text)])


def gathered(config: Config, layout: Layout, shape: TransformerConfig, parts: Sequence[Part]) -> Gathered:
    """What the first tensor rank with some stages gathers, and no other more than that; nothing below stage 3, and
    where shards are whole. `parts`: of the stages, in order.

    Of several stages it is a bound, as what follows on the last block of one is a matter of the schedule.
    """
    if not _is_sharded(config, layout):
        return Gathered(0, 0, "")
    units = _units(config, layout, shape, parts)
    if staging_of(config, layout, shape).halves:
        return Gathered(_elements(units), _elements(units), "what puts weight gradients off")
    options = gathering_options(config.zero)
    prefetch = options.get("prefetch", _PREFETCH)
    stages = [_Stage.of(units, tree, part, shape) for tree, part in enumerate(parts)]
    if _share_embedding(parts, shape):  # the first one's unit, which the last one reads as its head
        stages[-1].turns.append([unit for unit in units if "embedding.weight" in unit.parameters])
    ahead, others = [], [unit for unit in units if not any(unit in stage.along for stage in stages)]
    for stage in stages:
        sizes = [size for size, _ in _with_ahead(stage.turns, prefetch if len(stages) == 1 else 0)]
        ahead.append(_elements(stage.along) + max(sizes, default=0))
    strangers = sorted((unit.elements for unit in units), reverse=True)[:prefetch] if len(stages) > 1 else []
    alone = [
        (_elements(stage.along) + size, name)
        for stage in stages
        for size, name in [max(_with_ahead(stage.turns, 0), default=(0, "the part itself"))]
    ]
    everything = _elements(units)
    return Gathered(
        most=min(
            max(ahead) + sum(strangers) + _kept(others, options.get("keep_gathered", 0)),
            everything,
            options.get("max_live_parameters", everything),
        ),
        least=max(alone)[0],
        largest=max(alone)[1],
    )


@dataclass(frozen=True)
class _Stage:
    """The units of one of a rank's stages."""

    along: list[GatheredUnit]
    """In use from the first to the last block of a pass."""
    turns: list[list[GatheredUnit]]
    """In use one after the other."""

    @classmethod
    def of(cls, units: Sequence[GatheredUnit], tree: int, part: Part, shape: TransformerConfig) -> _Stage:
        is_shared = part.embedding and part.head and shape.tie_embeddings
        own = [unit for unit in units if unit.tree == tree]
        along = [unit for unit in own if _is_along(unit, is_shared)]
        return cls(along, _turns([unit for unit in own if unit not in along], part))


def _share_embedding(parts: Sequence[Part], shape: TransformerConfig) -> bool:
    """Whether the two ends of the model are stages of one rank, which share a tied embedding."""
    return len(parts) > 1 and shape.tie_embeddings and parts[0].embedding and parts[-1].head


def _is_sharded(config: Config, layout: Layout) -> bool:
    return config.zero.stage == 3 and layout.sharing > num_replicas(config)


def _units(
    config: Config, layout: Layout, shape: TransformerConfig, parts: Sequence[Part]
) -> tuple[GatheredUnit, ...]:
    """Those of the modules that the rank would build."""
    sizes = {"pp": layout.pipeline, "dp": layout.data, "cp": layout.context, "tp": layout.tensor}
    grid = Grid(sizes, num_replicas(config), layout.expert)
    modules = [
        Transformer(
            shape,
            tensor=_nobody(grid, "tp"),
            sequence_parallel=config.parallel.sequence,
            context=_nobody(grid, "cp"),
            context_form=config.parallel.context_form,
            expert=_nobody(grid, "ep"),
            expert_data=_nobody(grid, "expert_data"),
            part=part,
            device="meta",
        )
        for part in parts
    ]
    if _share_embedding(parts, shape):
        modules[-1].share_embedding(modules[0])
    else:
        ends = _nobody(grid, "pp")
        for module in modules:
            for _, parameter in module.tied_parameters():  # copies on other ranks are units of their own
                set_sharding(parameter, replace(sharding_of(parameter), tied=ends, partial=(ends,)))
    return plan_gathering(
        modules,
        shards=layout.sharing // num_replicas(config),
        bucket_mb=config.comm.bucket_mb,
        data=_nobody(grid, "data"),
    )


def _nobody(grid: Grid, name: str) -> Axis:
    """The axis of the first rank, to lay a module out over; nobody is on it."""
    ranks = grid.fibre((name,), 0)
    group = dist.ProcessGroup(0, len(ranks)) if len(ranks) > 1 else None  # type: ignore[call-arg] # torch's stub lacks this one
    return Axis(name, ranks, 0, group)


def _is_along(unit: GatheredUnit, is_shared: bool) -> bool:
    """Whether it is in use from the first to the last block of a pass."""
    return "" in unit.modules or (is_shared and "embedding.weight" in unit.parameters)


def _turns(units: Sequence[GatheredUnit], part: Part) -> list[list[GatheredUnit]]:
    """Those that are in use at the same time: one module's, which differ in what is summed where."""
    turns: dict[tuple[str, ...], list[GatheredUnit]] = {}
    for unit in units:
        turns.setdefault(unit.modules, []).append(unit)
    if not part.embedding and ("embedding",) in turns:  # a copy of it, which is the head here
        turns[("embedding",)] = turns.pop(("embedding",))
    return list(turns.values())


def _with_ahead(turns: Sequence[Sequence[GatheredUnit]], prefetch: int) -> Iterator[tuple[int, str]]:
    """Elements at each turn, forwards and backwards: its own, and what is gathered ahead of it. Units of one turn are
    in no certain order, so the largest count."""
    for order in (turns, turns[::-1]):
        for number, turn in enumerate(order):
            size, left = _elements(turn), prefetch
            for later in order[number + 1 :]:
                size += _elements(sorted(later, key=lambda unit: -unit.elements)[:left])
                left = max(0, left - len(later))
            yield size, turn[0].modules[0]


def _kept(units: Sequence[GatheredUnit], limit: int) -> int:
    """What stays: units as they are released first, as far as each still fits."""
    kept = 0
    for unit in units:
        kept += unit.elements if kept + unit.elements <= limit else 0
    return kept


def _elements(units: Sequence[GatheredUnit]) -> int:
    return sum(unit.elements for unit in units)
