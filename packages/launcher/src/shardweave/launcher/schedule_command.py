"""``shardweave schedule NAME``: a pipeline schedule, proven, simulated and drawn, without a model or a rank.

The answer to "which schedule, how many micro-batches" before anything is configured: the picture shows where ranks
stand idle, the table what that costs and how many activations are alive.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardweave.pipeline import Costs, Report, Schedule, Timeline

__all__ = ["schedule"]

SUFFIXES = (".svg", ".png", ".json", ".txt")


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    """Three numbers with commas between them."""
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not three numbers with commas, as in 1,1,1") from None
    return first, second, third


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--stages", type=click.IntRange(min=1), help="Pipeline ranks: parallel.pipeline of a run.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Micro-batches of a step.")
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Stages that each rank holds. V-shaped schedules have 2 whatever is said.",
)
@click.option(
    "--costs",
    callback=_numbers,
    default="1,1,1",
    show_default=True,
    metavar="F,I,W",
    help="Times of a stage's forward, input gradient and weight gradient, in any unit.",
)
@click.option(
    "--message",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Time of a message, in the same unit.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this file instead of drawing here: a picture (.svg, .png), or the lists (.json, .txt).",
)
def schedule(
    name: str,
    stages: int | None,
    microbatches: int | None,
    chunks: int,
    costs: tuple[float, float, float],
    message: float,
    out: Path | None,
) -> None:
    """Draws a pipeline schedule, with its bubble and peak activations.

    NAME is gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, v-half, v-min or dualpipe-v; or a file with
    a schedule of your own (.json, .txt), which is then proven first.

    \b
    Example:
      shardweave schedule zb-v --stages 4 --microbatches 8
      shardweave schedule interleaved --stages 8 --microbatches 32 --chunks 2 --out interleaved.svg
    """
    if out is not None and out.suffix not in SUFFIXES:
        raise click.UsageError(f"--out {out}: the name ends in one of {', '.join(SUFFIXES)}")
    if out is not None and not out.parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no directory {out.parent}; make it first")
    from shardweave.pipeline import Costs

    forward, first, second = costs
    try:
        plan = _plan(name, stages, microbatches, chunks)
        report = plan.validate()
        its_costs = Costs(forward=forward, backward=first + second, weight=second, message=message)
        timeline = plan.simulate(its_costs)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if name == "interleaved" and chunks == 1 and plan.num_ranks > 1:
        click.echo(
            "warning: interleaved with --chunks 1 is 1f1b; use --chunks 2 for a smaller bubble", err=True
        )
    click.echo(_heading(plan) + "\n")
    if out is None:
        click.echo(_picture(plan, its_costs, timeline))
    else:
        _write(out, plan, its_costs, timeline)
    click.echo(_figures(timeline, report))
    if out is not None:
        click.echo(f"\nwritten to {out}")


def _plan(name: str, stages: int | None, micro_batches: int | None, chunks: int) -> Schedule:
    """The schedule by its name, or from its file."""
    from shardweave.pipeline import BUILDERS, Schedule
    from shardweave.pipeline import schedule as by_name

    path = Path(name)
    if name not in BUILDERS and (path.suffix in (".json", ".txt") or path.is_file()):
        try:
            plan = Schedule.load(path)
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from None
        for option, said, its in (
            ("--stages", stages, plan.num_ranks),
            ("--microbatches", micro_batches, plan.num_micro_batches),
        ):
            if said not in (None, its):
                raise ValueError(f"{name}: {option} is {said} and the file has {its}; leave the option away")
        return plan
    if name in BUILDERS and (stages is None or micro_batches is None):
        missing = "--stages" if stages is None else "--microbatches"
        raise ValueError(f"schedule {name!r}: {missing} is missing; say --stages P --microbatches M")
    return by_name(name, ranks=stages or 1, micro_batches=micro_batches or 1, chunks=chunks)


def _heading(plan: Schedule) -> str:
    ranks, stages = plan.num_ranks, plan.num_stages
    if stages > ranks and stages % ranks == 0:
        size = f"{ranks} ranks x {stages // ranks} chunks = {stages} stages"
    else:
        size = f"{stages} stages on {ranks} ranks"
    return f"{plan.name}: {size}, {plan.num_micro_batches} micro-batches"


def _picture(plan: Schedule, costs: Costs, timeline: Timeline) -> str:
    """The timeline, as wide and as colourful as the terminal is; into a file or a pipe plain and in whole lines."""
    from shardweave.pipeline.draw.colours import NAMES

    is_terminal = sys.stdout.isatty()
    colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if is_terminal else None
    lines = [plan.draw(costs, colour=colour, width=width), ""]
    kinds = {timing.action.kind for row in timeline.timings for timing in row}
    lines.append(", ".join(f"{kind} {text}" for kind, text in NAMES.items() if kind in kinds) + ", . idle\n")
    return "\n".join(lines)


def _figures(timeline: Timeline, report: Report) -> str:
    """A line per rank, and what they come to."""
    header = ("rank", "bubble", "idle inside", "peak activations", "unsettled sends")
    rows = [
        (
            str(rank),
            f"{timeline.bubbles[rank]:.1%}",
            f"{timeline.inner_idle[rank]:.4g}",
            f"{timeline.peak_activations[rank]:.4g}",
            str(report.unsettled_sends[rank]),
        )
        for rank in range(len(timeline.timings))
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    peak = max(timeline.peak_activations)
    return "\n".join(
        [
            *lines,
            "",
            f"bubble {timeline.bubble_fraction:.1%} of a step of {timeline.step_time:.6g}; at most {peak:.4g} "
            "micro-batches alive, in shares of a whole rank",
        ]
    )


def _write(out: Path, plan: Schedule, costs: Costs, timeline: Timeline) -> None:
    """The file of --out; its name says of which kind."""
    try:
        if out.suffix == ".png":
            out.write_bytes(plan.png(costs))
        elif out.suffix == ".svg":
            out.write_text(plan.svg(costs), encoding="utf-8")
        elif out.suffix == ".txt":
            plan.save(out)
        else:
            figures = {
                "bubble_fraction": timeline.bubble_fraction,
                "peak_activations": list(timeline.peak_activations),
                "bubbles": list(timeline.bubbles),
                "inner_idle": list(timeline.inner_idle),
                "step_time": timeline.step_time,
            }
            out.write_text(_with_figures(plan.to_json(), figures), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--out {out}: {error.strerror}") from None


def _with_figures(text: str, figures: dict[str, object]) -> str:
    """The JSON object in ``text`` with more keys; a line per key, and per rank."""
    values = json.loads(text) | figures
    lines = []
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            lines.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
