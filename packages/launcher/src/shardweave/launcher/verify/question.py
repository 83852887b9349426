"""What ``shardweave verify`` was asked, and what it will compare: all that is known before a rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.overview import Overview
from shardweave.launcher.prepare import prepare
from shardweave.launcher.request import Request
from shardweave.launcher.verify.layout import DEFAULT_STEPS
from shardweave.launcher.verify.shrinking import Change, in_float64, shrink, uncompressed

__all__ = ["Question", "ask"]


@dataclass(frozen=True)
class Question:
    """A layout to compare with one process."""

    config: Config
    """Small, in the precision to compare in, writing nothing."""
    overview: Overview
    """Of that configuration."""
    changes: tuple[Change, ...]
    """How it differs from what was asked about."""
    steps: int
    warnings: tuple[str, ...] = ()

    def plain_changes(self) -> list[Mapping[str, Any]]:
        """As JSON."""
        return [
            {
                "setting": ".".join(str(part) for part in change.path),
                "from": change.before,
                "to": change.after,
                "reason": change.reason,
            }
            for change in self.changes
        ]


def ask(
    request: Request,
    *,
    steps: int = DEFAULT_STEPS,
    float64: bool = True,
    world_size: int | None = None,
) -> Question:
    """Reads and checks the configuration that is asked about, then makes it small.

    `world_size`: ranks that somebody else started; None: as many as the layout names.

    Raises:
        ConfigError: for everything that would end `train`, too.
    """
    prepared = prepare(request, world_size)
    layout = prepared.overview.layout
    shrunk = uncompressed(shrink(prepared.config, layout))
    shrunk = in_float64(shrunk) if float64 else shrunk
    quiet = shrunk.config.checkpoint.model_copy(update={"every": 0})
    config = shrunk.config.model_copy(update={"checkpoint": quiet})
    dataset = open_dataset(config, config.model.sequence)
    return Question(config, Overview.of(config, layout, dataset), shrunk.changes, steps, prepared.warnings)
