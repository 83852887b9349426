"""``shardweave verify`` on this machine: starts the ranks as `train` does, and says what they found."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shardweave.launcher.request import Request
from shardweave.launcher.verify.options import Options
from shardweave.launcher.zygote_first import with_zygote

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote

__all__ = ["verify_local"]


def verify_local(request: Request, options: Options) -> int:
    """Compares on local ranks; returns the exit status of the command."""
    return with_zygote(["shardweave.launcher.verify.rank"], lambda zygote: _verify(request, options, zygote))


def _verify(request: Request, options: Options, zygote: Zygote) -> int:
    from rich.console import Console

    from shardweave.launcher.prepare import check_machine
    from shardweave.launcher.processes import launch_local
    from shardweave.launcher.verify.question import ask
    from shardweave.launcher.verify.rank import REPORT
    from shardweave.launcher.verify.report import Report
    from shardweave.launcher.verify.show import PARTED, answer_text, show_answer, show_question

    question = ask(request, steps=options.steps, float64=options.float64)
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    for warning in question.warnings:
        errors.print(f"warning: {warning}", markup=False)
    check_machine(question.overview)
    if not options.as_json:
        show_question(console, question)
    directory = Path(tempfile.mkdtemp(prefix="shardweave-verify-"))
    outcome = launch_local(
        "shardweave.launcher.verify.rank:main",
        {"config": question.config.plain(), "steps": question.steps, "directory": str(directory)},
        world_size=question.overview.layout.world_size,
        run_dir=directory,
        port=request.port,
        zygote=zygote,
    )
    if outcome.failure is not None:  # it names a log, which stays
        errors.print(f"error: {outcome.failure}", markup=False)
        return outcome.exit_code
    try:
        if outcome.exit_code:
            errors.print("stopped; nothing was compared", markup=False)
            return outcome.exit_code
        report = Report.of(json.loads((directory / REPORT).read_text(encoding="utf-8")))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.as_json:
        print(answer_text(question, report))
    else:
        show_answer(console, report)
    return 0 if report.equal else PARTED
