"""One start at a time in a run's directory: two that write the same metrics and checkpoints spoil both.

The lock is the operating system's (``flock``) on a file in the directory, so it is gone with the process that holds it,
however that ends; what stands in the file only says who it was.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

__all__ = ["RunLock", "RunLockedError"]


class RunLockedError(RuntimeError):
    """Another process holds the lock; the text says which."""


class RunLock:
    """Held from its making to :meth:`release`, or the end of the process.

    RunLockedError: somebody else holds it. A file system without locks, as some network ones are, is taken as free.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 200).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            raise RunLockedError(
                f"the run directory {directory} is in use by {holder}; wait for it, stop it, or use another run.name"
            ) from None
        except OSError:
            return
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Lets others in."""
        os.close(self._file)
