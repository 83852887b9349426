"""One host: the namespaces of a process that does nothing but keep them, and how others enter them.

[Note: a host is a process]

``ip netns add`` gives a namespace a name, and a name outlives whoever made it. Here a host is the set of
namespaces (network, host name, mounts) of one small *keeper* process, with no name anywhere: when the keeper
ends, the kernel removes them, and the links in them. The keeper is a ``cat`` that reads from a pipe of the
process that made the bench, so it ends with that one, by whatever signal. Nothing is left to be removed at
the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...zygote.processes import num_threads
from .counters import LinkBytes, read_counters

__all__ = ["Host", "kill_inhabitants", "network_id", "start_keeper"]

_KINDS = ("net", "uts", "mnt")

_KEEPER = """
set -e
mount --bind "$1" /etc/hosts
echo "$2" > /proc/sys/kernel/hostname
# no addresses and no queries of IPv6's own on the link: its counters are to tell what ranks sent
if [ -e /proc/sys/net/ipv6/conf/all ]; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi
ip link set lo up
echo ready
exec cat
"""


@dataclass(frozen=True)
class Host:
    """A host of a bench; can be pickled, and is worth nothing once the bench has ended."""

    name: str
    """The host name that processes on it see."""
    address: str
    pid: int
    """Of the keeper."""

    def enter(self) -> None:
        """Moves this process onto the host: network, host name and hosts file; files stay the same.

        Only the calling thread moves, so there must be no other: RuntimeError if there is.
        """
        if num_threads() > 1:
            raise RuntimeError(
                f"{num_threads()} threads run, and the kernel moves one: enter a host before any starts"
            )
        directory = os.getcwd()
        with contextlib.ExitStack() as stack:
            descriptors = []
            for kind in _KINDS:  # all opened before the first is entered: /proc is another one afterwards
                descriptors.append(os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, descriptors[-1])
            for descriptor in descriptors:
                _setns(descriptor)
        os.chdir(directory)  # with the mounts, the kernel has moved it to the root

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as a command line that runs on the host, in this process's working directory.

        The process that it starts becomes the command: same pid, same pipes. ``/sys`` stays the machine's.
        """
        spaces = ["--net", "--uts", "--mount"]
        return ["nsenter", f"--target={self.pid}", *spaces, "env", f"--chdir={os.getcwd()}", *argv]

    def traffic(self) -> LinkBytes:
        """The counters of its link."""
        found = read_counters(Path(f"/proc/{self.pid}/net/dev").read_text())
        if found is None:
            raise RuntimeError(f"host {self.name} has no link")
        return found


@contextlib.contextmanager
def start_keeper(name: str, hosts_file: str) -> Iterator[subprocess.Popen[str]]:
    """A new host's keeper, which is ready when it has said so; ends it on exit."""
    with subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", _KEEPER, "keeper", hosts_file, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the one who made the bench, who ends it in order
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def network_id(pid: int | str) -> str | None:
    """What tells one network namespace from another; None for a process that has ended or is not ours."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def kill_inhabitants(networks: Collection[str], timeout: float = 5.0) -> None:
    """SIGKILL to every other process in ``networks``, until there is none (or, if stuck, ``timeout`` s)."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        others = {pid for pid in os.listdir("/proc") if pid.isdigit()} - {str(os.getpid())}
        found = [pid for pid in others if network_id(pid) in networks]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.005)


def _setns(descriptor: int) -> None:
    """``os.setns`` of Python 3.12."""
    if _LIBC is None or _LIBC.setns(descriptor, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
