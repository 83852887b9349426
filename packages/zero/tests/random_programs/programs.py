"""Draws a program from its seed, and runs it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from random import Random

from shardweave.comm import Mesh

from .operations import LAST, OPERATIONS, Operation
from .pair import Pair
from .settings import Setting

__all__ = ["program", "run_program", "run_programs"]


def program(seed: int) -> list[Operation]:
    """The operations, in order."""
    random = Random(f"program {seed}")
    often = [operation.often for operation in OPERATIONS]
    return [*random.choices(OPERATIONS, often, k=random.randint(6, 22)), *LAST]


def run_program(
    seed: int, setting: Setting, mesh: Mesh, *, only: Collection[int] = (), told: bool = False
) -> str:
    """A rank's part of one program. Returns why the setting was refused, or nothing if it ran to its end.

    ``only``: numbers of the operations to run; empty: all. Each draws from a source of its own, so that those that are
    left do what they did. ``told``: rank 0 prints each before it begins. AssertionError: names seed, operation and
    difference, as do notes added to all others.
    """
    where = f"seed {seed} ({setting})"
    try:
        pair = Pair(seed, setting, mesh)
    except ValueError as error:
        return str(error)
    try:
        for number, operation in enumerate(program(seed)):
            if only and number not in only:
                continue
            where = f"seed {seed} ({setting}), operation {number}, {operation.name}"
            if told and mesh.data.rank == 0:
                live = pair.sharded.optimizer.live_parameters
                print(f"{number} {operation.name}: {len(pair.pending)} pending, {live} gathered", flush=True)
            _run(operation, pair, Random(f"operation {seed} {number}"))
        pair.compare()
    except RuntimeError as error:
        if "max_live_parameters=" in str(error):
            return str(error)  # more is needed at once than the bound allows, and that is said
        raise AssertionError(f"{where}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{where}: {error or type(error).__name__}") from error
    return ""


def _run(operation: Operation, pair: Pair, random: Random) -> None:
    operation.run(pair, random)
    pair.check_live(f"after {operation.name}")
    if operation.changes and random.random() < 0.35:
        pair.compare()


def run_programs(
    seeds: Sequence[int], ranks: int, stage: int | None = None, only: Collection[int] = (), told: bool = False
) -> list[str]:
    """A rank's part of several programs: for each why it was refused, or nothing. Ends with the first that fails."""
    # torch says so where layers that would be recomputed are evaluated; it is what these programs do.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    whole = Mesh(dp=ranks)
    copies = Mesh(dp=ranks, replicas=2) if ranks % 2 == 0 else whole
    results = []
    for seed in seeds:
        setting = Setting.draw(Random(f"setting {seed}"), ranks, stage)
        if told and whole.data.rank == 0:
            print(f"seed {seed}: {setting}", flush=True)
        results.append(run_program(seed, setting, copies if setting.copies else whole, only=only, told=told))
    return results
