"""An end for a reason that is a person's to know and no fault of the program: a sentence, no traceback.

A checkpoint that does not fit, one that cannot be written, a guard that ends the run: every rank has the same error at
the same point, so none of them has to be killed. A disk that is full when one rank writes its metrics ends the others
as any failure does.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from shardweave.launcher.exit_status import MACHINE_UNFIT, USAGE_ERROR
from shardweave.launcher.guards import TrainingStopped
from shardweave.launcher.problems import ConfigError
from shardweave.models import HuggingFaceError
from shardweave.zero.checkpoint import CheckpointWriteError

__all__ = ["AgreedEnd", "agreed_ends"]

_STOPPED_BY_A_GUARD = 1
"""As of an exception: to run the same command again does not help."""


class AgreedEnd(Exception):
    """The text stands alone; `status` is the exit status of every rank."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@contextmanager
def agreed_ends() -> Iterator[None]:
    """Turns the errors that are the same on all ranks into one of these."""
    try:
        yield
    except (ConfigError, HuggingFaceError) as error:
        raise AgreedEnd(USAGE_ERROR, str(error)) from error
    except TrainingStopped as error:
        raise AgreedEnd(_STOPPED_BY_A_GUARD, str(error)) from error
    except CheckpointWriteError as error:
        raise AgreedEnd(
            MACHINE_UNFIT,
            f"{error}. The checkpoints before it are whole: make room, and the same command goes on from the newest",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise AgreedEnd(
            MACHINE_UNFIT,
            f"no space left for {error.filename or 'the files of the run'}; make room, and start again",
        ) from error
