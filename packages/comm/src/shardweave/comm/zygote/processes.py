"""What the kernel offers to end a tree of processes, in a few plain functions.

[Note: chain of death]

* Every process of the chain (zygote, leader, rank) asks the kernel for a signal when its parent dies
  (``PR_SET_PDEATHSIG``). A rank asks for SIGKILL. Zygote and leader ask for SIGTERM, which only wakes them:
  they look whether their parent is still the same, and if not kill what is below them. A SIGTERM from
  elsewhere (a batch system signals every process of a job) changes nothing: the owner decides.
* A rank leads a session, hence a process group, of its own; its loader processes are in it and die with it.
* Zygote and leader adopt orphans (``PR_SET_CHILD_SUBREAPER``): what a rank leaves behind becomes their child,
  also if it opened a session of its own. At the end of a group its leader kills until it has no child left;
  while other ranks still run, a dead rank's session is killed and daemons are left alone (whose are they?).

So whoever dies first, by whatever signal, the one above or below notices and sweeps: the owner kills the
groups of a dead leader's ranks; a zygote sweeps after a leader; a leader after its ranks. Only when owner,
zygote and leader are all killed in the same instant, a rank's own children are left to their own watchdog
(torch's DataLoader workers have one: they leave within five seconds of their parent).

Elsewhere than on Linux neither call exists. Then zygote and leader notice a lost parent by looking every half
second, and children of a rank that moved to another session are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "children",
    "kill_group",
    "kill_session",
    "kill_tree",
    "num_threads",
    "signal_on_parent_death",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def signal_on_parent_death(number: signal.Signals) -> None:
    """The kernel sends this process ``number`` when its parent dies; a no-op elsewhere than on Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants that lose their parent become children of this process (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def num_threads() -> int:
    """Threads of this process that the operating system knows, also those that Python did not start."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def children() -> list[int]:
    """Process ids of the children of this process, zombies included; empty where there is no /proc."""
    mine = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{mine}/task/{mine}/children").read_text().split()]
    except OSError:
        return _children_by_search(str(mine))


def kill_group(pid: int) -> None:
    """SIGKILL to the process ``pid`` and the group it leads (it may not have become a leader yet)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_session(session: int) -> None:
    """Kills those children of this process (adopted ones) that are in ``session``, whatever their group."""
    for pid in children():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                kill_group(pid)


def kill_tree(timeout: float = 5.0) -> None:
    """Kills and reaps every child of this process, and whatever it inherits while doing so."""
    deadline = time.monotonic() + timeout  # a process in the kernel's uninterruptible sleep is not waited for
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children():
            kill_group(pid)
        time.sleep(0.002)


def _children_by_search(parent: str) -> list[int]:
    """:func:`children` on a kernel without CONFIG_PROC_CHILDREN: looks at every process."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # "pid (command) state ppid ...": the command may hold anything, so count from its end
                if (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == parent:
                    found.append(int(entry.name))
    return found
