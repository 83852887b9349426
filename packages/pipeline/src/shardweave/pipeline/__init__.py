"""Pipeline parallelism for any list of modules, with schedules as data.

| name | what it is |
|---|---|
| `schedule`, `BUILDERS` | a schedule by name: `gpipe`, `1f1b`, loops, zero-bubble schedules, V shapes |
| `forward_only`, `keep` | the forwards of a schedule; its first micro-batches |
| `Schedule`, `Action` | what each rank does in order; validate, simulate, draw, write, read |
| `Costs`, `Timeline` | what a simulation takes and gives: bubble, peak of live activations |
| `ScheduleError` | why a schedule cannot run |
| `lower` | from a schedule to programs with sends and receives |
| `partition`, `ranges_by_rank` | where to cut a list of layers with known costs |
| `tie` | parameters that several stages share |
| `Pipeline` | runs a schedule over the modules of this rank |
"""

from __future__ import annotations

from ._version import __version__
from .actions import Action
from .builders import BUILDERS, schedule
from .builders.forward_only import forward_only
from .builders.keep import keep
from .dependencies import ScheduleError
from .lowering import lower
from .partitioning import partition, ranges_by_rank
from .runner import Pipeline
from .schedules import Schedule
from .simulate import Costs, Timeline, Timing
from .ties import tie

__all__ = [
    "BUILDERS",
    "Action",
    "Costs",
    "Pipeline",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "Timing",
    "__version__",
    "forward_only",
    "keep",
    "lower",
    "partition",
    "ranges_by_rank",
    "schedule",
    "tie",
]
