"""``shardweave train --nnodes``: this machine's part of a job over several, which may come and go.

The same command is given on every machine. The one whose address is in ``--rdzv-endpoint`` holds the store where all
meet, and keeps the run's directory for the job; all see that directory, which is on a file system that they share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardweave.launcher.request import Nodes, Request
from shardweave.launcher.zygote_first import with_zygote

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote
    from shardweave.launcher.agent import Job
    from shardweave.launcher.config import Config
    from shardweave.launcher.failures import Outcome
    from shardweave.launcher.fitting import Fitted
    from shardweave.launcher.meeting import Meeting
    from shardweave.launcher.restarts import Restarts

__all__ = ["launch_on_nodes", "train_on_nodes"]


def train_on_nodes(request: Request, nodes: Nodes) -> int:
    """Trains on this machine's ranks and others'; returns the exit status of the command."""
    # A store that goes with its machine is told in a sentence, not as a stack in torch's C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return with_zygote(["shardweave.launcher.rank"], lambda zygote: _train(request, nodes, zygote))


def _train(request: Request, nodes: Nodes, zygote: Zygote) -> int:
    from rich.console import Console

    from shardweave.comm.zygote import Entry
    from shardweave.launcher.agent import Job
    from shardweave.launcher.display import show_rows
    from shardweave.launcher.fitting import fit_layout
    from shardweave.launcher.meeting import STORE_GONE, Endpoint, Meeting
    from shardweave.launcher.prepare import MachineError, open_run, prepare
    from shardweave.launcher.problems import ConfigError
    from shardweave.launcher.reading import read_config
    from shardweave.launcher.run_directory import RunDirectory
    from shardweave.launcher.shape import transformer_config
    from shardweave.launcher.shown_run import Listening, shown_run

    loaded = read_config(request.config, request.overrides)
    config, shape = loaded.config, transformer_config(loaded.config)
    ranks = nodes.ranks or _ranks_here(config, nodes)

    def fit(world: int) -> Fitted:
        try:
            return fit_layout(config, world, shape)
        except ConfigError as error:
            raise ConfigError(error.problems, loaded.origins) from None

    fit(ranks * nodes.least)  # refuses what could not go on
    prepared = prepare(replace(request, overrides=(*request.overrides, *fit(ranks * nodes.most).overrides)))
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    for warning in prepared.warnings:
        errors.print(f"warning: {warning}", markup=False)
    run = RunDirectory.of(config)
    meeting = Meeting(
        Endpoint.parse(nodes.endpoint),
        nodes.job or config.run.name,
        nodes.least,
        nodes.most,
        patience=nodes.patience,
        say=lambda text: console.print(text, markup=False),
    )
    if meeting.hosting:
        opened = open_run(prepared.overview)  # keeps the directory's lock
        meeting.store.set("start", json.dumps([opened.step, opened.start]))
        if opened.aside:
            console.print(f"an earlier run of this name is now {opened.aside}", markup=False)
    try:
        step, start = json.loads(meeting.store.get("start"))
    except STORE_GONE:
        raise MachineError(
            f"the machine that holds the store at {nodes.endpoint} ended before the job began, and says why"
        ) from None
    run.path.mkdir(parents=True, exist_ok=True)
    show_rows(console, [*prepared.overview.header(), ("start", start), ("machines", _machines(nodes, ranks))])

    def launch(listening: Listening) -> Outcome:
        payload = {"config": config.plain(), "directory": str(run.path), "start": step}
        entry = Entry.parse("shardweave.launcher.rank:main")
        job = Job(entry, payload, ranks, run, zygote, listening.stops, listening.on_line)
        return launch_on_nodes(job, meeting, listening.restarts, fit, listening.say)

    return shown_run(config, run, step, console, errors, launch)


def launch_on_nodes(
    job: Job, meeting: Meeting, restarts: Restarts, fit: Callable[[int], Fitted], say: Callable[[str], None]
) -> Outcome:
    """Runs this machine's part of a job and waits for the end of the whole; as `launch_local` does for one machine.

    `fit`: the layout on so many ranks; `job.payload` gets its configuration.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from shardweave.launcher.exit_status import MACHINE_UNFIT, USAGE_ERROR
    from shardweave.launcher.failures import Outcome
    from shardweave.launcher.meeting import STORE_GONE
    from shardweave.launcher.node_agent import NodeAgent
    from shardweave.launcher.prepare import MachineError
    from shardweave.launcher.problems import ConfigError
    from shardweave.launcher.processes import quiet_elastic
    from shardweave.launcher.verdicts import Decision

    agent = NodeAgent(job, meeting, restarts, fit, say)
    try:
        with closing(agent), quiet_elastic():
            job.stops.listen()
            try:
                agent.run()
            except SignalException as signalled:
                status = 128 + signalled.sigval
                text = f"ended by {signalled.sigval.name}: {job.stops.reason}"
                agent.end_at_once(Decision(again=False, status=status, stopped=text))
                return Outcome(status, stopped=text)
            except (ConfigError, MachineError) as error:
                status = USAGE_ERROR if isinstance(error, ConfigError) else MACHINE_UNFIT
                failed = _failed(status, str(error))
                agent.end_at_once(Decision(again=False, status=status, failure=failed.failure))
                return failed
        decision = agent.decision
        return Outcome(decision.status, decision.failure, decision.stopped)
    except STORE_GONE as error:
        return _failed(
            1,
            f"the store at {meeting.endpoint} does not answer any more ({str(error).partition(chr(10))[0]}): the "
            "machine that holds it is gone, and without it no machine can go on; the same command on all machines "
            "goes on from the last checkpoint",
        )
    finally:
        meeting.leave()


def _failed(status: int, message: str) -> Outcome:
    from shardweave.launcher.failures import Failure, Outcome

    return Outcome(status, Failure(rank=None, kind="machine", status=status, message=message))


def _ranks_here(config: Config, nodes: Nodes) -> int:
    """One for each accelerator; on CPUs this machine's share of the layout that the configuration names."""
    import torch

    from shardweave.comm.devices import accelerator
    from shardweave.launcher.layout import layout_of

    if config.run.device != "cpu" and accelerator() is not None:
        return torch.accelerator.device_count()
    return -(-layout_of(config).world_size // nodes.most)


def _machines(nodes: Nodes, ranks: int) -> str:
    count: Any = nodes.least if nodes.least == nodes.most else f"{nodes.least} to {nodes.most}"
    return f"{count}, {ranks} ranks on this one, meeting at {nodes.endpoint}"
