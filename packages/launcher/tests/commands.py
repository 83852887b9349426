"""The command in processes of its own, as tests start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

COMMAND = [sys.executable, "-m", "shardweave.launcher"]
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
ENDLESS = """
run: {name: tiny, steps: 100000, eval_every: 0, device: cpu}
model: {layers: 2, hidden: 16, heads: 2, sequence: 16}
data: {source: text.txt}
parallel: {tensor: 2}
batch: {global: 4, micro: 2}
checkpoint: {every: 0}
"""


def environment() -> dict[str, str]:
    """Without what would make the command one rank of several; one thread each, as ranks outnumber the cores."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1"}


def start_endless(
    place: Path, *arguments: str, command: Sequence[str] = COMMAND, output: IO[str] | None = None
) -> subprocess.Popen[str]:
    """Two ranks that train in ``place/runs/tiny`` until they are stopped, in a session of their own.

    ``output``: where both streams go; default: a pipe for each.
    """
    (place / "text.txt").write_text(TEXT * 40)
    (place / "tiny.yaml").write_text(ENDLESS)
    return subprocess.Popen(
        [*command, "train", "tiny.yaml", *arguments],
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.PIPE if output is None else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def rank_pids(run: Path) -> list[int]:
    """By rank."""
    return [rank["pid"] for rank in json.loads((run / "ranks.json").read_text())["ranks"]]
