"""The options that a program runs with, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from shardweave.zero import LossScale

__all__ = ["SGD", "Setting"]

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
"""Of both sides. Linear in the gradients, so that small mistakes stay small ones and are not hidden by any scale."""


@dataclass(frozen=True)
class Setting:
    """Of one program. Units are small (``bucket_mb``): the net has some 650 parameters."""

    stage: int
    copies: bool
    """Whether shards are inside one of two copies."""
    options: dict[str, Any]
    """Further ones of :class:`ZeroOptimizer`."""

    @classmethod
    def draw(cls, random: Random, ranks: int, stage: int | None) -> Setting:
        """``stage``: this one; None: any of them, most often 3."""
        copies = ranks > 2 and ranks % 2 == 0 and random.random() < 0.25
        drawn = random.choice([3, 3, 3, 3, 2, 1, 0])
        stage = drawn if stage is None else stage
        options: dict[str, Any] = {
            "bucket_mb": random.choice([2e-4, 4e-4, 1e-3, 1]),
            "clip": random.choice([None, None, 0.5]),
        }
        if stage >= 2:
            where = random.random()
            if where < 0.2:
                options["shard_between_micro_batches"] = random.random() < 0.5
            elif where < 0.4:
                options["whole_gradients_mb"] = random.choice([1e-4, 10])
        if stage == 3:
            options |= _gathering(random)
        if random.random() < 0.2:
            options["loss_scale"] = LossScale(initial=2.0**8)
        return cls(stage, copies, options)

    @property
    def bound(self) -> int | None:
        """How many parameters may be gathered at any time."""
        bound: int | None = self.options.get("max_live_parameters")
        return bound

    @property
    def kept(self) -> int:
        """How many may stay gathered after their use."""
        kept: int = self.options.get("keep_gathered", 0)
        return kept

    @property
    def persistent(self) -> int:
        """Up to which size a unit is always gathered."""
        size: int = self.options.get("persistent_parameters", 0)
        return size

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items() if value is not None)
        return f"stage {self.stage}, {'two copies, ' if self.copies else ''}{options}"


def _gathering(random: Random) -> dict[str, Any]:
    options: dict[str, Any] = {"prefetch": random.choice([0, 1, 1, 2, 5])}
    if random.random() < 0.3:
        options["keep_gathered"] = random.choice([60, 150, 2000])
    if random.random() < 0.3:
        options["persistent_parameters"] = random.choice([10, 60])
    if random.random() < 0.4:
        options["max_live_parameters"] = random.choice([450, 600, 800])
    return options
