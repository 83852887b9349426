"""The lattice: combinations of all options, trained and held against one process: ``nox -s lattice``.

Each point trains five steps of a run in its layout, from the checkpoint that the point before it has saved in another
one. Losses, norms and parameters are compared with one process that trains the whole run without a stop. A point that
fails or hangs is listed at the end with the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from integration_tests.lattice.chains import build
from integration_tests.lattice.covering import Point
from integration_tests.lattice.outcomes import Chain, Outcome, outcomes
from integration_tests.lattice.table import LINES, layout_options, num_ranks, run_options

ABREAST = 2
"""Runs that are trained in one process each at the same time."""


def main() -> int:
    """Trains all points, or one; 0 when each equals one process."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.lattice", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--list", action="store_true", help="print the points and stop")
    parser.add_argument(
        "--point", type=int, metavar="N", help="only this one, after those of its chain before it"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, other points (default 0)")
    options = parser.parse_args()
    chains = number(build(options.seed))
    if options.list:
        for chain in chains:
            for line in describe(chain):
                print(line)
        return 0
    if options.point is not None:
        chains = [cut for chain in chains for cut in up_to(chain, options.point)]
        if not chains:
            parser.error(f"there is no point {options.point}; --list shows them")
    return run(chains, f"--seed {options.seed} " if options.seed else "")


def number(points: Sequence[Sequence[Point]]) -> list[Chain]:
    """The chains with their points numbered from 1."""
    chains: list[Chain] = []
    first = 1
    for chain in points:
        chains.append(Chain(chain, first, len(chain)))
        first += len(chain)
    return chains


def up_to(chain: Chain, number: int) -> list[Chain]:
    """The chain as far as the point of that number; nothing if it has no such point."""
    length = number - chain.first + 1
    return [Chain(chain.points, chain.first, length)] if 1 <= length <= chain.length else []


def run(chains: Sequence[Chain], seed: str) -> int:
    """Trains the chains and prints what comes of their points."""
    begin, total = time.monotonic(), sum(chain.length for chain in chains)
    done: list[Outcome] = []
    for start in range(0, len(chains), ABREAST):
        with tempfile.TemporaryDirectory(prefix="shardweave-lattice-") as folder:
            Path(folder, LINES).write_text("".join(lines()), encoding="utf-8")
            for outcome in outcomes(chains[start : start + ABREAST], Path(folder)):
                done.append(outcome)
                print(f"{len(done):3}/{total}  {text(outcome)}", flush=True)
    failed = [outcome for outcome in done if outcome.wrong]
    trained = sum(outcome.seconds for outcome in done)
    print(
        f"{total - len(failed)} of {total} points equal one process; {time.monotonic() - begin:.0f} s, "
        f"{trained:.0f} s of them in points"
    )
    for outcome in failed:
        print(f"again: python -m integration_tests.lattice {seed}--point {outcome.number}")
    return 1 if failed else 0


def describe(chain: Chain) -> list[str]:
    """A chain as lines: what is trained, and in which layouts."""
    run = {name: chain.points[0][name] for name in run_options()}
    points = [f"{chain.first + i:5}  {layout(point)}" for i, point in enumerate(chain.points)]
    return [", ".join(f"{name} {value}" for name, value in run.items()), *points]


def layout(point: Point) -> str:
    """The layout of a point, shortly."""
    return f"{num_ranks(point)} ranks: " + ", ".join(f"{name} {point[name]}" for name in layout_options())


def text(outcome: Outcome) -> str:
    """A point's line, and what is wrong with it in lines of their own."""
    state = "PARTS" if outcome.wrong else "equal"
    head = f"{state} {outcome.seconds:5.1f} s  point {outcome.number}, {outcome.point['numbers']}: "
    lines = [head + layout(outcome.point) + (f"  ({outcome.apart})" if outcome.apart else "")]
    lines += [f"         {line}" for wrong in outcome.wrong[:5] for line in wrong.splitlines()[-40:]]
    return "\n".join(lines)


def lines() -> list[str]:
    """A corpus of a few short documents: some sixty samples."""
    documents = [f"line {number} of a small corpus, " * 3 for number in range(25)]
    return [json.dumps({"text": document}) + "\n" for document in documents]


if __name__ == "__main__":
    sys.exit(main())
