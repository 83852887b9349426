"""Pipeline parallelism for any list of modules, with schedules as data.

| name | what it is |
|---|---|
| `schedule`, `BUILDERS` | a schedule by name: `gpipe`, `1f1b`, loops, zero-bubble schedules, V shapes |
| `RULES`, `Rule` | how many chunks and micro-batches each takes, and where its stages are |
| `forward_only`, `keep` | the forwards of a schedule; its first micro-batches |
| `Schedule`, `Action` | what each rank does in order; validate, simulate, draw, write, read |
| `Report` | what a valid schedule takes: live activations, buffers of messages |
| `Costs`, `PieceCosts` | what a simulation takes: given, counted from pieces of a model, or measured |
| `Timeline` | what it gives: bubble, idle time, memory over time, critical path |
| `ScheduleError` | why a schedule cannot run |
| `lower` | from a schedule to programs with sends and receives |
| `partition` | where to cut a list of layers with known costs |
| `partition_by_memory`, `partition_by_sizes`, `partition_by_layout` | by bytes, by hand, by a string of letters |
| `ranges_by_rank` | what each rank builds of it |
| `measure_pieces` | what the pieces of a model cost, in seconds and bytes |
| `cut`, `pieces_of`, `Piece`, `Cuttable`, `StageModule` | from a model to the modules of its stages |
| `tie`, `tie_all`, `shared_parameters` | parameters that several stages share |
| `Pipeline` | runs a schedule over the modules of this rank |
"""

from __future__ import annotations

from ._version import __version__
from .actions import Action
from .builders import BUILDERS, schedule
from .builders.forward_only import forward_only
from .builders.keep import keep
from .builders.rules import RULES, Rule
from .costs import Costs, PieceCosts
from .cutting import Cuttable, Piece, StageModule, cut, pieces_of, shared_parameters
from .errors import ScheduleError
from .layout_text import partition_by_layout
from .lowering import lower
from .measuring import measure_pieces
from .memory import MemoryAt
from .partitioning import partition, partition_by_memory, partition_by_sizes, ranges_by_rank
from .report import Report
from .runner import Pipeline
from .schedules import Schedule
from .tied_groups import tie_all
from .ties import tie
from .timeline import Timeline
from .timing import Timing

__all__ = [
    "BUILDERS",
    "RULES",
    "Action",
    "Costs",
    "Cuttable",
    "MemoryAt",
    "Piece",
    "PieceCosts",
    "Pipeline",
    "Report",
    "Rule",
    "Schedule",
    "ScheduleError",
    "StageModule",
    "Timeline",
    "Timing",
    "__version__",
    "cut",
    "forward_only",
    "keep",
    "lower",
    "measure_pieces",
    "partition",
    "partition_by_layout",
    "partition_by_memory",
    "partition_by_sizes",
    "pieces_of",
    "ranges_by_rank",
    "schedule",
    "shared_parameters",
    "tie",
    "tie_all",
]
