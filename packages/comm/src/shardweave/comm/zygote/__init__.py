"""Ranks by fork: eight are up in about a second, against twenty when each imports torch itself.

A *zygote* is a process with one thread that has imported torch (and what torch imports late) and has run
nothing. It forks a *leader* for every group of ranks; the leader imports what the group needs and forks the
ranks, so that an import is paid once per group::

    owner (pytest, the launcher)
      └─ zygote             imported torch; one thread; its own session
           └─ leader        one per group: imports the entry point, forks, reaps, reports
                ├─ rank 0   its own session and process group
                │    └─ loader processes ...
                └─ rank 1 ...

Nobody outlives the one above: a process that loses its parent ends, and takes its descendants with it
(see [Note: chain of death] in :mod:`.processes`). Owner and leader talk over a private socket pair; arguments
are pickled onto it, entry points travel as names.
"""

from __future__ import annotations

from .entry import Entry, EntryError
from .exits import RankExit, signal_name
from .failures import RankFault, first_fault, lost_peer
from .group import RankGroup
from .owner import PRELOAD, Zygote, ZygoteError

__all__ = [
    "PRELOAD",
    "Entry",
    "EntryError",
    "RankExit",
    "RankFault",
    "RankGroup",
    "Zygote",
    "ZygoteError",
    "first_fault",
    "lost_peer",
    "signal_name",
]
