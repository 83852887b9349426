"""Local ranks, from start to end: the one call that the commands use.

See :mod:`.agent` for who does what below it.
"""

from __future__ import annotations

import logging
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from shardweave.comm.zygote import Entry, EntryError, Zygote, ZygoteError
from shardweave.launcher.agent import Job, LocalAgent
from shardweave.launcher.exit_status import MACHINE_UNFIT
from shardweave.launcher.failures import Failure, Outcome
from shardweave.launcher.rendezvous import LocalRendezvous, LoopbackError, PortError
from shardweave.launcher.restarts import Restarts
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.stop_watch import StopWatch

__all__ = ["launch_local", "quiet_elastic"]


def launch_local(
    entry: str,
    payload: Mapping[str, Any],
    *,
    world_size: int,
    run_dir: Path,
    port: int = 0,
    restarts: Restarts | None = None,
    on_line: Callable[[int, str], None] | None = None,
    on_start: Callable[[list[int]], None] | None = None,
    stops: StopWatch | None = None,
    zygote: Zygote,
) -> Outcome:
    """Runs ``entry(payload)`` on ``world_size`` ranks of this machine and waits for their end.

    ``zygote``: started before this process had a second thread, with ``shardweave.launcher.rank_entry`` among
    its imports. ``entry``: ``module:function``. ``payload`` is pickled to each rank, where ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are in the environment, as under torchrun; so
    ``shardweave.comm.init()`` works. ``port``: of the store on 127.0.0.1 where they meet; 0 for a free one.

    Output goes to ``run_dir/ranks/rank-00003.log``, and line by line to ``on_line(rank, line)``;
    ``on_start`` gets the pids by rank. Both are called in this thread. When a rank fails, the others have
    two seconds to fail too, and are killed; ``restarts`` says whether all are started again. Then ``payload`` has one
    key more, ``restarted``: the failure in a sentence.

    However this call ends, no process of the job is left, loader processes of ranks included; and if this
    process is killed, they all end within seconds.

    Signals are heard when this is called in the main thread. Ranks that train are asked to stop with a checkpoint by
    SIGINT, SIGTERM, SIGHUP and SIGUSR1; what else a signal may do is in `stop_watch`. ``stops``: hears them after
    this call, too, until its owner releases it; None: the caller's handlers are back when this returns.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: a job needs at least one rank")
    directory = RunDirectory(Path(run_dir))
    watch = StopWatch() if stops is None else stops
    job = Job(Entry.parse(entry), payload, world_size, directory, zygote, watch, on_line, on_start)
    counted = Restarts() if restarts is None else restarts
    agent: LocalAgent | None = None
    try:
        watch.listen()
        with (
            closing(LocalRendezvous(port, run_id=uuid.uuid4().hex)) as rendezvous,
            closing(LocalAgent(job, rendezvous, counted)) as agent,
            quiet_elastic(),
        ):
            agent.run()
        return _outcome(agent, counted)
    except SignalException as ended:
        return _ended_at_once(agent, ended.sigval, watch.reason)
    except EntryError as error:
        return _failed("entry", 1, f"entry point {entry}: {error.reason}", error.traceback)
    except PortError as error:
        text = f"{error.strerror}; leave the port out (a free one is taken), or choose another"
        return _failed("machine", MACHINE_UNFIT, text)
    except LoopbackError as error:
        return _failed("machine", MACHINE_UNFIT, str(error.strerror))
    except ZygoteError as error:
        return _failed("machine", MACHINE_UNFIT, f"the ranks could not be started: {error}")
    finally:
        if stops is None:
            watch.release()


def _outcome(agent: LocalAgent, restarts: Restarts) -> Outcome:
    assert agent.context is not None  # the agent has run
    context = agent.context
    failure = context.failure
    if failure is not None:
        return Outcome(failure.status, restarts.told(failure))
    stop = context.stop
    return Outcome(0) if stop is None else Outcome(stop.status, stopped=str(stop))


def _ended_at_once(agent: LocalAgent | None, number: signal.Signals, reason: str) -> Outcome:
    stop = None if agent is None or agent.context is None else agent.context.stop
    if stop is not None:  # all ranks had saved and were on their way out
        return Outcome(stop.status, stopped=str(stop))
    return Outcome(128 + number, stopped=f"ended by {signal.Signals(number).name}: {reason}")


def _failed(kind: Any, status: int, message: str, traceback: str = "") -> Outcome:
    return Outcome(status, Failure(rank=None, kind=kind, status=status, message=message, traceback=traceback))


@contextmanager
def quiet_elastic() -> Iterator[None]:
    """What the agent has to say reaches the user as an :class:`Outcome`, not as log lines on stderr."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.NullHandler()
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
