"""The agent of one of several machines: ranks that come and go with the machines.

::

    meet ──> start ranks ──> watch ──> say how they ended, hear how all others' did ──> one decision for all
      ^                        │                                                          │
      │                        ├ a rank here fails, or another machine says so            ├ end, with one status
      │                        ├ a machine is lost (no sign of life)                      │
      │                        └ a machine wants to come in: ranks save and stop          │
      └─────────────────────────────────────────── again <───────────────────────────────┘

Elastic's own loop has each agent count its own failures and go to the next rendezvous alone; here all machines decide
alike, from the same verdicts (`verdicts`), so that a failure is told, counted and ended by all of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store  # torch.distributed has it, untyped
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from shardweave.comm.store import PREFIX
from shardweave.launcher.agent import GRACE, POLL_EVERY, Job, LocalAgent, RankContext, rank_environments
from shardweave.launcher.failures import Failure
from shardweave.launcher.fitting import Fitted
from shardweave.launcher.meeting import STORE_GONE, Meeting, interface_of
from shardweave.launcher.rank_logs import RankLogs
from shardweave.launcher.restarts import Restarts
from shardweave.launcher.stopping import REGROUP, StopBoard
from shardweave.launcher.verdicts import Decision, Ending, Verdict, conclude

__all__ = ["ENDED", "NodeAgent"]

ENDED = "ended"
"""Key of the job's store: the decision that ended it, for machines that come late."""

_RESTARTS = "restarts"
_BEGUN = "begun"
_PATIENCE = 20.0
"""Seconds for another machine's verdict, while it gives signs of life."""


class NodeAgent(LocalAgent):
    """The agent of this machine.

    Args:
        job: `world_size` ranks on this machine, of which as many run as the layout needs.
        fit: the layout on so many ranks.
        say: gets what a person should know.
    """

    def __init__(
        self,
        job: Job,
        meeting: Meeting,
        restarts: Restarts,
        fit: Callable[[int], Fitted],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(job, meeting, restarts)
        self._meeting, self._fit, self._say = meeting, fit, say
        self._hosts: list[str] = []
        self._reason = ""
        self.decision = Decision(again=True)
        """What became of the last attempt."""

    # -- the loop --

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        while self.decision.again:
            self._job.stops.started()  # while machines meet there is nothing to save: a signal ends it
            try:
                self._initialize_workers(self._worker_group)
            except RendezvousClosedError:
                break
            verdict = self._watch()
            self.decision = self._agree(self._hear_all(verdict))
            self._restarts.take_over(self.decision.restarts)
            self._reason = self.decision.reason
            self._pause(self.decision.wait)
        if self.decision.again:
            self.decision = self._others_end()
        else:
            self._end(self.decision)
        return RunResult(state=WorkerState.FAILED)  # of no consequence: `decision` is what counts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Starts those of this machine's ranks that the layout has a place for."""
        meeting, place = self._meeting, int(worker_group.group_rank or 0)
        board = meeting.attempt_store("board")
        board.set(f"host/{place}", socket.gethostname())
        self._hosts = [
            board.get(f"host/{other}").decode() for other in range(worker_group.group_world_size or 1)
        ]
        fitted = self._fit(worker_group.workers[0].world_size)
        worker_group.workers = [
            worker for worker in worker_group.workers if worker.global_rank < fitted.layout.world_size
        ]
        ranks = [worker.global_rank for worker in worker_group.workers]
        self._board = StopBoard(meeting.attempt_store("ranks"))
        again = self._is_again(board, place)
        self._say(self._announcement(fitted, ranks))
        if not ranks:
            self._pcontext = self.context = None
            return {}
        self.close()  # those of the last attempt
        self._logs = RankLogs({local: self._job.directory.log(rank) for local, rank in enumerate(ranks)})
        payload = {**self._job.payload, "config": fitted.config.plain()}
        if again:
            payload["restarted"] = f"{self._reason or 'other machines'}; now {fitted}"
        envs = rank_environments(
            worker_group,
            world=fitted.layout.world_size,
            attempt=meeting.round,  # elastic's own is each agent's; this one is the same on all machines
            more=self._own_environment(),
        )
        self._pcontext = self.context = RankContext(self._job, payload, envs, self._logs, self._board)
        self.context.start()
        return self.context.pids()

    def _own_environment(self) -> dict[str, str]:
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(self._meeting.address)
        return {
            PREFIX: f"attempt-{self._meeting.round}/ranks",
            **({} if interface is None else {"GLOO_SOCKET_IFNAME": interface}),
        }

    def _is_again(self, board: Store, place: int) -> bool:
        """Whether ranks have trained before; the same on all machines. And how often the job was started again."""
        if place == 0:
            store = self._meeting.store
            state = store.get(_RESTARTS).decode() if store.check([_RESTARTS]) else "[0, -1, 0]"
            reason = self._reason
            board.set("attempt", json.dumps([store.check([_BEGUN]), json.loads(state), reason]))
        again, counted, reason = json.loads(board.get("attempt"))
        self._restarts.take_over(tuple(counted))
        self._reason = self._reason or reason
        return bool(again)

    def _announcement(self, fitted: Fitted, ranks: list[int]) -> str:
        machines = (
            f"{len(self._hosts)} machines ({', '.join(self._hosts)})" if len(self._hosts) > 1 else "1 machine"
        )
        mine = (
            f"ranks {ranks[0]} to {ranks[-1]} are here"
            if ranks
            else "no rank is here: this machine is a spare"
        )
        return f"{machines}: {fitted}; {mine}"

    # -- one attempt --

    def _watch(self) -> Verdict:
        """Until this machine's ranks have ended, or have to."""
        board = self._meeting.attempt_store("board")
        begun = False
        while True:
            time.sleep(POLL_EVERY)
            result = None if self.context is None else self._monitored()
            if result is WorkerState.FAILED:
                board.set("failed", "1")  # the others' collectives hang, or will
                return self._verdict(board)
            if result is WorkerState.SUCCEEDED:
                return self._verdict(board)
            if self.context is None and board.check(["over"]):
                return self._verdict(board)
            if board.check(["failed"]) or len(self._meeting.present()) < len(self._hosts):
                return self._verdict(board)
            if not begun and self._board.begun:
                begun = True
                self._meeting.store.set(_BEGUN, "1")
            first = self._worker_group.group_rank == 0
            if begun and first and self._meeting.num_nodes_waiting() and not self._board.asked:
                self._board.ask(REGROUP)
                self._say(
                    "another machine is there: the ranks stop after the running step, with a checkpoint"
                )

    def _monitored(self) -> WorkerState:
        # Not this class' parent's, which decides about restarts.
        result: RunResult = super(LocalAgent, self)._monitor_workers(self._worker_group)
        return result.state

    def _verdict(self, board: Store) -> Verdict:
        """What became of this machine's ranks, none of which is left."""
        failure: Failure | None = None
        if self.context is not None:
            self.context.settle()
            failure = self.context.failure
        order = int(board.add("order", 1))
        stop = self._board.left if failure is None else None
        verdict = Verdict(order, failure, stop, idle=self.context is None)
        board.set(f"verdict/{self._worker_group.group_rank}", verdict.to_json())
        board.set("over", "1")
        return verdict

    def _hear_all(self, mine: Verdict) -> Ending | None:
        """All machines' verdicts; who gives none and no sign of life either is lost. None: it is decided already,
        by a machine that was told to end, or that has found another one lost.
        """
        board = self._meeting.attempt_store("board")
        verdicts = {int(self._worker_group.group_rank or 0): mine}
        deadline = time.monotonic() + (
            _PATIENCE if mine.failure is not None else math.inf
        )  # a last save may take long
        while missing := [place for place in range(len(self._hosts)) if place not in verdicts]:
            present = self._meeting.present()
            for place in missing:
                if board.check([f"verdict/{place}"]):
                    verdicts[place] = Verdict.from_json(board.get(f"verdict/{place}"))
            if set(missing) - set(verdicts) and board.check(["decision"]):
                return None
            if time.monotonic() > deadline or not [
                place for place in missing if place in present | set(verdicts)
            ]:
                break
            time.sleep(POLL_EVERY)
        return conclude(verdicts, self._hosts)

    def _agree(self, ending: Ending | None) -> Decision:
        """What becomes of the job: the first machine's opinion is everybody's."""
        board = self._meeting.attempt_store("board")
        if ending is None:
            decision = Decision.from_json(board.get("decision"))
            if decision.again:
                self._say(f"{decision.reason}: all meet again and go on from the last checkpoint")
            return decision
        mine = self._opinion(ending)
        decided = Decision.from_json(board.compare_set("decision", "", mine.to_json()))
        self._meeting.store.set(_RESTARTS, json.dumps(decided.restarts))
        return decided

    def _opinion(self, ending: Ending) -> Decision:
        restarts, failure = self._restarts, ending.failure
        if ending.kind == "done":
            return Decision(again=False)
        if ending.kind == "stopped" and ending.stop is not None:
            return Decision(again=False, status=ending.stop.status, stopped=str(ending.stop))
        if ending.kind == "regroup":
            return Decision(again=True, reason="another machine came", restarts=restarts.state)
        if ending.kind == "lost":
            verb = "is" if len(ending.lost) == 1 else "are"
            text = f"{', '.join(ending.lost)} {verb} lost, after step {restarts.progress}"
            if self._job.stops.heard:
                failure = Failure(None, "machine", 1, f"{text}, while the job was asked to stop")
                return Decision(again=False, status=1, failure=failure)
            self._say(f"{text}: the others meet again and go on from the last checkpoint")
            return Decision(again=True, reason=text, restarts=restarts.state)
        assert failure is not None
        wait = None if self._job.stops.heard else restarts.after(failure)
        if wait is None:
            failure = restarts.told(failure)
            return Decision(again=False, status=failure.status, failure=failure, restarts=restarts.state)
        return Decision(again=True, reason=restarts.reason, wait=wait, restarts=restarts.state)

    def end_at_once(self, decision: Decision) -> None:
        """For all machines, without a verdict of this one: it was told to end."""
        if self._meeting.round >= 0:  # it has been a part of the job
            with contextlib.suppress(*STORE_GONE):
                board = self._meeting.attempt_store("board")
                board.compare_set("decision", "", decision.to_json())
                board.set("failed", "1")
            self._end(decision)

    def _others_end(self) -> Decision:
        """What the machines have decided that have ended the job without this one."""
        store = self._meeting.store
        if store.check([ENDED]):
            return Decision.from_json(store.get(ENDED))
        failure = Failure(None, "machine", 1, "another machine has ended the job, and did not say why")
        return Decision(again=False, status=1, failure=failure)

    def _end(self, decision: Decision) -> None:
        """For good, on all machines; the one that holds the store leaves last."""
        store = self._meeting.store
        with contextlib.suppress(*STORE_GONE, RendezvousError):
            store.set(ENDED, decision.to_json())
            self._meeting.set_closed()
            left = store.add(f"left/{self._meeting.round}", 1)
            deadline = time.monotonic() + 3 * GRACE
            while self._meeting.hosting and left < len(self._hosts) and time.monotonic() < deadline:
                time.sleep(POLL_EVERY)
                left = store.add(f"left/{self._meeting.round}", 0)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        self._meeting.leave()
