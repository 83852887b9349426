"""torch elastic's agent, with ranks from a zygote.

The agent brings rendezvous, monitoring and restarts. Its own ways to start ranks cost an import of torch per
rank (20 s for eight) and its ends are rough: every status becomes 1, and a killed agent leaves its ranks
behind. Both live in its process context, so this module replaces that one part::

    launch_local ── LocalAgent.run()            rendezvous, watch, restart            (torch elastic)
                      └─ RankContext            start, poll, end, read the logs       (this module)
                           └─ RankGroup         fork, reap, kill the whole tree       (shardweave.comm.zygote)

Signals are not elastic's either, which ends the ranks at the first: a `StopWatch` hears them, and between two looks at
the ranks it passes a request on to them, through the store of the attempt (see `stopping`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from shardweave.comm.store import loopback_interface
from shardweave.comm.zygote import Entry, RankExit, RankFault, RankGroup, Zygote
from shardweave.launcher.failures import Failure, error_file, read_fault
from shardweave.launcher.rank_entry import run_rank
from shardweave.launcher.rank_logs import RankLogs
from shardweave.launcher.rendezvous import LocalRendezvous
from shardweave.launcher.restarts import Restarts
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.stop_watch import StopWatch
from shardweave.launcher.stopping import Stop, StopBoard

__all__ = ["GRACE", "Job", "LocalAgent", "RankContext", "rank_environments"]

GRACE = 2
"""Seconds that the other ranks have after the first failure, or ranks that do not train yet after a signal."""

POLL_EVERY = 0.05
"""Seconds between looks at ranks and logs."""


@dataclass(frozen=True)
class Job:
    """What the ranks of this machine are to run, and who wants to hear of it."""

    entry: Entry
    payload: Mapping[str, Any]
    world_size: int
    directory: RunDirectory
    zygote: Zygote
    stops: StopWatch
    on_line: Callable[[int, str], None] | None = None
    on_start: Callable[[list[int]], None] | None = None


class LogFiles(LogsSpecs):
    """Tells elastic where the ranks of a run write."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(log_dir=str(directory.path))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        return str(self._directory.path)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        logs = {local_rank: str(self._directory.log(rank)) for local_rank, rank in ranks.items()}
        errors = {local_rank: str(error_file(self._directory, rank)) for local_rank, rank in ranks.items()}
        return LogsDest(stdouts=logs, stderrs=dict(logs), error_files=errors)


class RankContext(PContext):
    """The ranks of one attempt on this machine. `payload`: what they are to be called with."""

    def __init__(
        self,
        job: Job,
        payload: Mapping[str, Any],
        envs: dict[int, dict[str, str]],
        logs: RankLogs,
        board: StopBoard,
    ) -> None:
        super().__init__("rank", run_rank, dict.fromkeys(envs, ()), envs, LogFiles(job.directory))
        self.exits: tuple[RankExit, ...] = ()
        """The ends that this process did not cause, in their order; known once the context is closed."""
        self.silent: tuple[int, ...] = ()
        """The ranks that had not ended by then, and were killed."""
        self._job, self._payload = job, dict(payload)
        self._ranks = [int(envs[local]["RANK"]) for local in sorted(envs)]
        self._logs = logs
        self._board = board
        self._group: RankGroup | None = None

    @property
    def stop(self) -> Stop | None:
        """The stop that the ranks have agreed on and saved for, if they have."""
        return self._board.left

    @property
    def failure(self) -> Failure | None:
        """The first failure among `exits`; None: there is none, or the ranks still run."""
        return Failure.first_of(self._failures(self.exits), self.faults, self._job.directory, self.silent)

    @property
    def faults(self) -> dict[int, RankFault]:
        """What the failed ranks recorded."""
        found = {ended.rank: read_fault(error_file(self._job.directory, ended.rank)) for ended in self.exits}
        return {rank: fault for rank, fault in found.items() if fault is not None}

    def start(self) -> None:
        """Starts the ranks, without elastic's handlers for signals."""
        self._start()

    def pids(self) -> dict[int, int]:
        return {} if self._group is None else dict(enumerate(self._group.pids))

    def pass_on_lines(self) -> None:
        """Hands the new whole lines of all ranks to whoever listens."""
        if self._job.on_line is not None:
            for rank, line in self._logs.new_lines():
                self._job.on_line(rank, line)

    def settle(self) -> None:
        """After a failure: gives the other ranks time to fail by themselves, then kills what is left.

        What they say in that time (their peer is gone, or what it was waiting for) helps to tell cause from
        effect. No collective can complete any more, so there is nothing else to wait for.
        """
        self._end(GRACE)

    def _start(self) -> None:
        job = self._job
        for path in self.error_files.values():
            if os.path.exists(path):
                os.unlink(path)  # of an earlier attempt
        ranks = range(self.nprocs)
        job.stops.started()
        self._group = job.zygote.spawn(
            Entry.of(run_rank),
            [(job.entry, self._payload, self.error_files[rank]) for rank in ranks],
            environment=[self.envs[rank] for rank in ranks],
            output=[job.directory.log(rank) for rank in self._ranks],
            imports=(job.entry,),
        )
        if job.on_start is not None:
            job.on_start(list(self._group.pids))

    def _poll(self) -> RunProcsResult | None:
        assert self._group is not None  # elastic polls what it has started
        self._group.poll()
        self.pass_on_lines()
        self._job.stops.look(self._board)
        failed = self._failures(self._group.exits)
        if failed:
            return RunProcsResult(failures={ended.rank: self._process_failure(ended) for ended in failed})
        if self._group.running:
            return None
        return RunProcsResult(return_values=dict.fromkeys(range(self.nprocs)))

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._group is not None and not self._group.done:
            self._group.signal(death_sig)
        self._end(timeout)

    def _end(self, timeout: float) -> None:
        """Waits for the ranks, kills them and all they have started, reads their logs to the end."""
        if self._group is None or self._group.done:
            self.exits = self.exits or (() if self._group is None else self._named(self._group.exits))
            return
        deadline = time.monotonic() + timeout
        while self._group.running and (left := deadline - time.monotonic()) > 0:
            self._group.poll(min(left, POLL_EVERY))
            self.pass_on_lines()
        self.exits = self._named(self._group.exits)
        self.silent = tuple(self._ranks[local] for local in self._group.running)
        self._group.kill()

    def _named(self, exits: tuple[RankExit, ...]) -> tuple[RankExit, ...]:
        """By their ranks in the whole job."""
        return tuple(replace(ended, rank=self._ranks[ended.rank]) for ended in exits)

    def _failures(self, exits: tuple[RankExit, ...]) -> tuple[RankExit, ...]:
        """What did not end well: neither with status 0 nor, after an agreed stop, with that stop's own."""
        bad = tuple(ended for ended in exits if not ended.ok)
        stop = self.stop if bad else None
        return bad if stop is None else tuple(ended for ended in bad if ended.status != stop.status)

    def _process_failure(self, ended: RankExit) -> ProcessFailure:
        return ProcessFailure(
            local_rank=ended.rank,
            pid=ended.pid,
            exitcode=ended.status,
            error_file=self.error_files[ended.rank],
        )


def rank_environments(
    worker_group: WorkerGroup, *, world: int, attempt: int, more: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """What the group's workers find in their environment, as under torchrun, and `more`; by local rank.

    `world`: ranks of the job. `attempt`: its number, from 0.
    """
    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(len(worker_group.workers)),
        "GROUP_RANK": str(worker_group.group_rank),
        "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
        "MASTER_ADDR": str(worker_group.master_addr),
        "MASTER_PORT": str(worker_group.master_port),
        "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(worker_group.spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        **more,
    }
    return {
        worker.local_rank: {
            **common,
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
        }
        for worker in worker_group.workers
    }


class LocalAgent(LocalElasticAgent):
    """The elastic agent of the one machine of a job."""

    def __init__(self, job: Job, rendezvous: RendezvousHandler, restarts: Restarts) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.world_size,
            rdzv_handler=rendezvous,
            entrypoint=run_rank,
            max_restarts=restarts.limit,
            monitor_interval=POLL_EVERY,
        )
        super().__init__(spec, LogFiles(job.directory), shutdown_timeout=GRACE)
        self._job = job
        self._restarts = restarts
        self._logs = RankLogs({})
        self.context: RankContext | None = None
        """The ranks of the last attempt."""

    def close(self) -> None:
        """After the run: passes on what is left in the logs."""
        for rank, line in self._logs.last_lines():
            if self._job.on_line is not None:
                self._job.on_line(rank, line)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        envs = rank_environments(
            worker_group,
            world=self._job.world_size,
            attempt=self._restarts.used,
            # All ranks are here; gloo would look up the host's name, which is slow or wrong on many machines.
            more={"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback_interface())},
        )
        rendezvous = worker_group.spec.rdzv_handler
        assert isinstance(rendezvous, LocalRendezvous)
        board = StopBoard(rendezvous.store)
        self._logs = self._logs or RankLogs(
            {rank: self._job.directory.log(rank) for rank in range(self._job.world_size)}
        )
        payload = dict(self._job.payload)
        if self._restarts.used:
            payload["restarted"] = self._restarts.reason
        self._pcontext = self.context = RankContext(self._job, payload, envs, self._logs, board)
        self.context.start()
        return self.context.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Looks at the ranks, and after a failure decides whether elastic may start them again."""
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            assert self.context is not None  # it has failed
            self.context.settle()
            failure, stops = self.context.failure, self._job.stops
            wait = None if failure is None or stops.heard else self._restarts.after(failure)
            self._remaining_restarts = 0 if wait is None or not self._pause(wait) else 1
        return result

    def _pause(self, seconds: float) -> bool:
        """Waits; False: the job was asked to stop meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._job.stops.heard and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_EVERY))
        return not self._job.stops.heard

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """After a failure, for good or before a restart."""
        if self.context is not None:
            self.context.settle()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """At the end, and when a signal ends the job at once.

        Ranks that train only note a SIGTERM (see `stopping`), so it is no use to wait for them.
        """
        stops = self._job.stops
        stops.over()
        super()._shutdown(signal.SIGTERM, 0 if stops.begun else timeout)

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """Nobody records elastic's events, and for each of them it would ask the network for its own name."""
        return Event(f"torchelastic.worker.status.{state}", source=source)
