"""What the machines of a job tell each other when an attempt of its ranks has ended, and what follows; pure.

Every machine says how its own ranks ended. The first of them that is not about a lost peer is the cause; a machine that
says nothing is lost; and what becomes of the job is written down once, by whoever comes first, and read by all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardweave.launcher.failures import Failure
from shardweave.launcher.stopping import REGROUP, Stop

__all__ = ["Decision", "Ending", "Verdict", "conclude"]


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended on one machine."""

    order: int
    """Of all machines' verdicts, in which they were given."""
    failure: Failure | None = None
    stop: Stop | None = None
    """What the ranks have agreed on and saved for; without it and without a failure they are done."""
    idle: bool = False
    """The machine had no rank."""

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """From the store."""
        plain = json.loads(text)
        failure, stop = plain.pop("failure"), plain.pop("stop")
        return cls(
            **plain,
            failure=None if failure is None else _failure(failure),
            stop=None if stop is None else Stop(**stop),
        )


@dataclass(frozen=True)
class Ending:
    """How an attempt ended on all machines."""

    kind: Literal["done", "stopped", "regroup", "lost", "failed"]
    failure: Failure | None = None
    """The first one."""
    stop: Stop | None = None
    lost: tuple[str, ...] = ()
    """Names of the machines that have gone."""


@dataclass(frozen=True)
class Decision:
    """What becomes of the job."""

    again: bool
    """Whether all machines meet again."""
    reason: str = ""
    """Why, for the metrics."""
    wait: float = 0.0
    """Seconds before that."""
    status: int = 0
    """Otherwise the exit status."""
    failure: Failure | None = None
    stopped: str = ""
    """The end of a run that was asked to stop, in a sentence without a full stop."""
    restarts: tuple[int, int, int] = (0, -1, 0)
    """See `Restarts.state`."""

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> Decision:
        """From the store."""
        plain = json.loads(text)
        failure, restarts = plain.pop("failure"), plain.pop("restarts")
        return cls(**plain, failure=None if failure is None else _failure(failure), restarts=tuple(restarts))


def conclude(verdicts: Mapping[int, Verdict], hosts: Sequence[str]) -> Ending:
    """`verdicts`: by the machine's place, of those that gave one. `hosts`: names of all machines of the attempt."""
    given = sorted(verdicts.values(), key=lambda verdict: verdict.order)
    failures = [verdict.failure for verdict in given if verdict.failure is not None]
    agreed = [failure for failure in failures if failure.kind == "agreed"]
    lost = tuple(host for place, host in enumerate(hosts) if place not in verdicts)
    if lost and not agreed:  # what else failed, failed of that
        return Ending("lost", lost=lost)
    if failures:
        # A cause comes before an effect, and among effects the one that knows of a rank that hung.
        return Ending("failed", min(failures, key=lambda failure: (failure.lost_peer, not failure.remark)))
    stops = [verdict.stop for verdict in given if verdict.stop is not None]
    if not stops:
        return Ending("done")
    return Ending("regroup" if stops[0].signal == REGROUP else "stopped", stop=stops[0])


def _failure(plain: dict[str, object]) -> Failure:
    log, others = plain.pop("log"), plain.pop("others")
    return Failure(**plain, log=None if log is None else Path(str(log)), others=tuple(others))  # type: ignore[arg-type]
