"""Where a run keeps its files, and the two small ones that every start rewrites.

::

    DIR/NAME/
      config.yaml           the resolved configuration
      metrics.jsonl         one JSON object per step and per evaluation
      texts.jsonl           with `run.sample_every`: step, prompt and text of each
      ranks.json            who runs where, since the last start
      topology.json         over several nodes: who shares one, and the links as they were measured
      ranks/rank-00003.log  what each rank printed
      checkpoints/step-00000020/
      huggingface/          of an import: what came along with the first weights and is none
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.comm.files import write_atomically
from shardweave.launcher.config import Config

__all__ = ["RunDirectory"]


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        """The directory that a configuration names."""
        return cls(Path(os.path.expanduser(config.run.dir)) / config.run.name)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def texts(self) -> Path:
        return self.path / "texts.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks.json"

    @property
    def topology(self) -> Path:
        return self.path / "topology.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def huggingface(self) -> Path:
        return self.path / "huggingface"

    def log(self, rank: int) -> Path:
        """The file that a local rank's output goes to."""
        return self.path / "ranks" / f"rank-{rank:05d}.log"

    def set_aside(self) -> Path | None:
        """Renames an earlier run of this name to ``NAME.1`` (``.2``, ...) and returns where it is now.

        For `checkpoint.resume: never`: a run that starts over must not mix with what is there, nor delete it.
        """
        if not self.metrics.exists() and not self.checkpoints.exists():
            return None
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(target)
        return target

    def write_ranks(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Writes ranks.json; each entry has rank, pid, host and coordinates."""
        lines = ",\n  ".join(json.dumps(dict(rank)) for rank in ranks)
        write_atomically(self.ranks, f'{{"ranks": [\n  {lines}\n]}}\n')
