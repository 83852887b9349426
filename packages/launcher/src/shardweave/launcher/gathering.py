"""What ranks gather at a time under ZeRO stage 3: arithmetic on the model that would be built, before any rank starts.

::

    in use all along     what is the part's own: its norms, and an embedding that is the head as well
    in use in turn       block after block, with the units that are gathered ahead (`zero.prefetch`)
    idle                 what is kept for the backward pass (`zero.keep_gathered`)
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
from shardweave.launcher.layout import Layout, stages_of
from shardweave.launcher.problems import ConfigError, Problem
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
    needs = [
        gathered(config, layout, shape, part)
        for part in stages_of(layout, shape, chunked_loss=config.batch.chunked_loss)
    ]
    stage, need = max(enumerate(needs), key=lambda item: item[1].least)
    if need.least > limit:
        text = (
            f"`zero.max_live_parameters: {limit}` is less than the {need.least} that stage {stage} has in use at once, "
            f"when {need.largest} runs; use {need.least} or more, auto, or a smaller comm.bucket_mb"
        )
        raise ConfigError([Problem(("zero", "max_live_parameters"), text)])


def gathered(config: Config, layout: Layout, shape: TransformerConfig, part: Part) -> Gathered:
    """What the first tensor rank of one stage gathers, and no other more than that; nothing below stage 3, and where
    shards are whole."""
    if not _is_sharded(config, layout):
        return Gathered(0, 0, "")
    units = _units(config, layout, shape, part)
    is_shared = part.embedding and part.head and shape.tie_embeddings
    along = [unit for unit in units if _is_along(unit, is_shared)]
    others = [unit for unit in units if not _is_along(unit, is_shared)]
    turns = _turns(others, part)
    always, everything = _elements(along), _elements(units)
    options = gathering_options(config.zero)
    ahead = [size for size, _ in _with_ahead(turns, options.get("prefetch", _PREFETCH))]
    alone = max(_with_ahead(turns, 0), default=(0, "the part itself"))
    return Gathered(
        most=min(
            always + max(ahead, default=0) + _kept(others, options.get("keep_gathered", 0)),
            everything,
            options.get("max_live_parameters", everything),
        ),
        least=always + alone[0],
        largest=alone[1],
    )


def _is_sharded(config: Config, layout: Layout) -> bool:
    return config.zero.stage == 3 and layout.sharing > num_replicas(config)


def _units(config: Config, layout: Layout, shape: TransformerConfig, part: Part) -> tuple[GatheredUnit, ...]:
    """Those of the module that the rank would build."""
    sizes = {"pp": layout.pipeline, "dp": layout.data, "cp": layout.context, "tp": layout.tensor}
    grid = Grid(sizes, num_replicas(config), layout.expert)
    module = Transformer(
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
    ends = _nobody(grid, "pp")
    for _, parameter in module.tied_parameters():  # copies on other stages are units of their own
        set_sharding(parameter, replace(sharding_of(parameter), tied=ends, partial=(ends,)))
    return plan_gathering(
        module,
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
