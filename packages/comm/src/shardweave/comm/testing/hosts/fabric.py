"""What joins the hosts: a bridge in the kernel, or, for delay and loss, a relay process.

Either gives each host an interface ``weave0``. Set up from here, in the namespaces' own terms, with
iproute2. ::

    host 0           switch            host 1
    weave0 ══veth══ p0 ─ br0 ─ p1 ══veth══ weave0            Bridge: a namespace of its own in the middle
    weave0 ──────── relay process ──────── weave0            Relay: a TUN device in each host
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol

from . import relay
from .counters import INTERFACE
from .host import Host, start_keeper

__all__ = ["Bridge", "Fabric", "Relay", "bridge", "heard_ready", "in_network", "relayed"]


class Fabric(Protocol):
    """What stands between the hosts."""

    def set_port(self, host: int, *, up: bool) -> None:
        """Whether anything passes to and from ``host``; its own interface stays up, as with a cut cable."""


class Bridge:
    """The kernel's; as quick as memory, and shaped only at the hosts' own interfaces."""

    def __init__(self, switch: int) -> None:
        self.switch = switch
        """Pid of a process in its namespace."""

    def set_port(self, host: int, *, up: bool) -> None:
        in_network(self.switch, "ip", "link", "set", f"p{host}", "up" if up else "down")


class Relay:
    """A process that carries the packets: see :mod:`.relay`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def set_port(self, host: int, *, up: bool) -> None:
        reading, writing = self.process.stdout, self.process.stdin
        if reading is None or writing is None or self.process.poll() is not None:
            raise RuntimeError(f"the relay has ended with status {self.process.returncode}")
        print("mend" if up else "cut", host, file=writing, flush=True)
        reading.readline()  # its "ok": from here on it is so


@contextlib.contextmanager
def bridge(hosts: Sequence[Host], mtu: int) -> Iterator[Bridge]:
    """A bridge with a cable to each of ``hosts``, whose other end is the host's interface."""
    with start_keeper("switch", "/etc/hosts") as switch:
        heard_ready(switch)
        # without multicast snooping, for which a bridge sends packets of its own
        lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        for index, host in enumerate(hosts):
            far = f"peer name {INTERFACE} mtu {mtu} netns {host.pid}"
            lines.append(f"link add p{index} mtu {mtu} type veth {far}")
            lines.append(f"link set p{index} master br0 up")
        in_network(switch.pid, "ip", "-batch", "-", text="\n".join(lines))
        yield Bridge(switch.pid)


@contextlib.contextmanager
def relayed(hosts: Sequence[Host], *, delay: float, loss: float) -> Iterator[Relay]:
    """A running relay between ``hosts``. ``delay``: seconds, one way."""
    ends = [(host.pid, host.address) for host in hosts]
    with subprocess.Popen(
        relay.program(ends, interface=INTERFACE, delay=delay, loss=loss),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            heard_ready(process)
            yield Relay(process)
        finally:
            process.kill()


def heard_ready(process: subprocess.Popen[str]) -> None:
    """Waits until ``process`` says ``ready``; RuntimeError with what it says on stderr if it ends instead."""
    if process.stdout is None or process.stdout.readline() != "ready\n":
        error = process.communicate()[1]
        raise RuntimeError(
            f"a part of the bench did not start (status {process.returncode}): {error.strip()}"
        )


def in_network(pid: int, *argv: str, text: str = "") -> None:
    """Runs a command in the network namespace of ``pid``; RuntimeError with its stderr if it fails."""
    command = ["nsenter", f"--target={pid}", "--net", *argv]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
