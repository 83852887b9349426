"""A command that starts local ranks: first their zygote, then everything else.

The zygote is forked while this process has one thread and has imported nothing but torch, and it needs seconds to
import what ranks need. In that time this process reads and checks the configuration, whose mistakes end it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote

__all__ = ["with_zygote"]

_MODULES = ("numpy", "shardweave.launcher.rank_entry", "shardweave.zero.checkpoint.storage")
"""The last is imported by the first save otherwise, on every rank."""


def with_zygote(modules: Sequence[str], work: Callable[[Zygote], int]) -> int:
    """``work(zygote)``'s status, or that of a mistake it raised. `modules`: what the ranks run, imported ahead."""
    # Importing makes many objects and no garbage: without collections it takes a tenth less. The zygote inherits
    # this; ranks switch collections on again.
    gc.disable()
    from shardweave.comm.zygote import PRELOAD, Zygote

    zygote = Zygote.start((*PRELOAD, *_MODULES, *modules))
    try:
        from shardweave.launcher.describe import fail
        from shardweave.launcher.exit_status import MACHINE_UNFIT
        from shardweave.launcher.prepare import MachineError
        from shardweave.launcher.problems import ConfigError

        gc.enable()
        try:
            return work(zygote)
        except ConfigError as error:
            return fail(error)
        except MachineError as error:
            return fail(error, MACHINE_UNFIT)
    finally:
        zygote.close(timeout=0.1)  # it may be in the middle of an import that nobody needs any more
