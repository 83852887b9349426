"""Runs programs: ``python -m packages.zero.tests.random_programs FIRST LAST --ranks 2 [--stage 3]``.

Prints seed, operation and difference of each that fails, and how many ran; the exit status is 1 if one failed. One seed
is run again with ``SEED --told``, and cut down with ``--only 3 7 8``: those of its operations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from packages.zero.tests.random_programs.programs import run_programs

from shardweave.comm.testing import RankError, run_ranks

__all__ = ["main"]

TOGETHER = 20
"""Programs that the same processes run."""
SECONDS = 180
"""For that many; then they hang."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's words."""
    parser = argparse.ArgumentParser(description="Random training loops, sharded and in plain torch.")
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument(
        "last", type=int, nargs="?", help="the seed after the last; by default only the first runs"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=range(4), help="by default any")
    parser.add_argument(
        "--only", type=int, nargs="+", default=(), help="run only these operations of each program"
    )
    parser.add_argument("--told", action="store_true", help="print each operation before it runs")
    asked = parser.parse_args(arguments)
    last = asked.first + 1 if asked.last is None else asked.last

    seeds, refused, failures = range(asked.first, last), 0, 0
    for first in range(0, len(seeds), TOGETHER):
        for seed, outcome in outcomes(seeds[first : first + TOGETHER], asked).items():
            if isinstance(outcome, RankError):
                print(f"seed {seed} failed\n{outcome}", flush=True)
            elif outcome and asked.told:
                print(f"seed {seed}: {outcome}")
            failures += isinstance(outcome, RankError)
            refused += isinstance(outcome, str) and bool(outcome)
    equal = len(seeds) - refused - failures
    print(f"{asked.ranks} ranks: {equal} programs equal plain torch, {refused} refused, {failures} failed")
    return int(failures > 0)


def outcomes(seeds: Sequence[int], asked: argparse.Namespace) -> dict[int, str | RankError]:
    """Of each seed why it was refused, or how it failed, or an empty text. Where one fails, each runs alone."""
    try:
        found: list[list[str]] = run_ranks(
            run_programs,
            asked.ranks,
            seeds,
            asked.ranks,
            asked.stage,
            asked.only,
            asked.told,
            timeout=SECONDS,
        )
    except RankError as error:
        if len(seeds) == 1:
            return {seeds[0]: error}
        alone = {seed: outcome for seed in seeds for outcome in outcomes([seed], asked).values()}
        if not any(isinstance(outcome, RankError) for outcome in alone.values()):
            alone[seeds[-1]] = error  # they fail only after each other
        return alone
    return dict(zip(seeds, found[0], strict=True))


if __name__ == "__main__":
    sys.exit(main())
