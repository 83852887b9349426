"""``shardweave verify`` as one of many ranks that torchrun, srun or a job controller started."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardweave import comm
from shardweave.launcher.describe import say_once
from shardweave.launcher.exit_status import USAGE_ERROR
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.request import Request
from shardweave.launcher.verify.options import Options
from shardweave.launcher.verify.question import Question, ask
from shardweave.launcher.verify.rank import verify
from shardweave.launcher.verify.report import Report
from shardweave.launcher.verify.show import PARTED, answer_text, show_answer, show_question

__all__ = ["verify_joined"]


def verify_joined(request: Request, options: Options) -> NoReturn:
    """Compares as the rank that the environment describes, and ends the process."""
    try:
        world_size = int(os.environ["WORLD_SIZE"])
        question = ask(request, steps=options.steps, float64=options.float64, world_size=world_size)
        report: Report = record(_verify)(question, options)  # type: ignore[assignment]  # raises, or returns ours
    except ConfigError as error:
        say_once(error)
        comm.shutdown(USAGE_ERROR)
    # All ranks have the same answer, and all of them end with its status, together.
    comm.shutdown(0 if report.equal else PARTED, together=True)


def _verify(question: Question, options: Options) -> Report:
    first = os.environ["RANK"] == "0"
    console = Console(highlight=False)
    if first:
        for warning in question.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if not options.as_json:
            show_question(console, question)
    report = verify(question.config, question.steps)
    if first and options.as_json:
        print(answer_text(question, report), flush=True)
    elif first:
        show_answer(console, report)
    return report
