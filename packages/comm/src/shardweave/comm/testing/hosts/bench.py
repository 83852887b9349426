"""The bench: hosts, what joins them, and the hands on the links."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from .available import HostsUnavailable, hosts_unavailable
from .counters import INTERFACE, LinkBytes
from .fabric import Fabric, bridge, heard_ready, in_network, relayed
from .host import Host, kill_inhabitants, network_id, start_keeper
from .shaping import bits_per_second, bucket

__all__ = ["Hosts"]

_SUBNET = "10.231.0"  # exists in the hosts' namespaces only, so every bench may have the same
_MOST_HOSTS = 200
_LEAST_MTU, _MOST_MTU = 1280, 65000


class _Running(NamedTuple):
    hosts: tuple[Host, ...]
    fabric: Fabric


class Hosts:
    """Several hosts on this machine, each with a network, a host name and a hosts file of its own.

    ::

        with Hosts(2, rate="1gbit") as hosts:
            run_ranks(work, 8, hosts=hosts)      # ranks 0 to 3 on node0, 4 to 7 on node1
            print(hosts.traffic(0))              # LinkBytes(received=..., sent=...)

    ``rate``: what each host can send, as tc writes it (``"200mbit"``) or in bits per second, headers included;
    None: as quick as memory. What it can receive is not limited. ``delay_ms``: one way; ``loss``: the part of
    packets that gets lost. Either of them takes the packets through a process, which carries some 5 Gbit/s, as
    not every kernel has ``netem``. ``mtu``: the size of frames in bytes; with 9000, as in clusters, headers and
    acknowledgements are about 1 % of the bytes.

    On exit every process on a host is killed, and hosts and links are gone; hosts and links also when this
    process dies, by whatever signal. HostsUnavailable, on entry: see :func:`.hosts_unavailable`.
    """

    def __init__(
        self,
        number: int,
        *,
        rate: str | float | None = None,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        mtu: int = 9000,
    ) -> None:
        if not 1 <= number <= _MOST_HOSTS:
            raise ValueError(f"{number} hosts: a bench has 1 to {_MOST_HOSTS}")
        if delay_ms < 0:
            raise ValueError(f"delay_ms={delay_ms}: milliseconds, 0 or more")
        if not 0 <= loss < 1:
            raise ValueError(f"loss={loss}: the part of packets that gets lost, from 0 up to (not with) 1")
        if not _LEAST_MTU <= mtu <= _MOST_MTU:
            raise ValueError(f"mtu={mtu}: bytes of a frame, {_LEAST_MTU} to {_MOST_MTU}")
        self.names = tuple(f"node{index}" for index in range(number))
        """Their host names, which resolve on each of them."""
        self.addresses = tuple(f"{_SUBNET}.{index + 1}" for index in range(number))
        """Their IPv4 addresses, which exist on these hosts only."""
        self._rate = None if rate is None else bits_per_second(rate)
        self._delay = delay_ms / 1000
        self._loss = loss
        self._mtu = mtu
        self._running: _Running | None = None
        self._stack = contextlib.ExitStack()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Host:
        """One host, for a process that is to enter it."""
        return self._now.hosts[index]

    def __enter__(self) -> Hosts:
        relay = self._delay > 0 or self._loss > 0
        if self._running is not None:
            raise RuntimeError("this bench runs already: make another Hosts for other hosts")
        if (reason := hosts_unavailable(relay=relay)) is not None:
            raise HostsUnavailable(reason)
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(_start_hosts(self.names, self.addresses))
            fabric: contextlib.AbstractContextManager[Fabric] = (
                relayed(hosts, delay=self._delay, loss=self._loss) if relay else bridge(hosts, self._mtu)
            )
            self._running = _Running(hosts, stack.enter_context(fabric))
            stack.callback(setattr, self, "_running", None)
            for host in hosts:
                self._set_address(host)
            self.set_rate(self._rate)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """``argv`` as a command line that runs on a host: for :mod:`subprocess`, with its ``env`` and pipes.

        The process that it starts becomes the command, in this process's working directory. It sees the
        host's network, host name and ``/etc/hosts``, and else this machine's files, ``/sys`` included.
        """
        return self[index].command(argv)

    def traffic(self, index: int) -> LinkBytes:
        """What a host has received and sent since it exists, in bytes, as the kernel counted it."""
        return self[index].traffic()

    def set_rate(self, rate: str | float | None) -> None:
        """Another ``rate`` for every host, from now on; connections stay."""
        words = ["pfifo"] if rate is None else bucket(bits_per_second(rate), self._mtu)
        for host in self._now.hosts:
            in_network(host.pid, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *words)

    def cut(self, index: int) -> None:
        """Nothing passes to or from a host any more, and nobody is told: like a cable that is pulled."""
        self._now.fabric.set_port(range(len(self))[index], up=False)

    def mend(self, index: int) -> None:
        """Undoes :meth:`cut`; TCP goes on when its next retransmission is due."""
        self._now.fabric.set_port(range(len(self))[index], up=True)

    @property
    def _now(self) -> _Running:
        if self._running is None:
            raise RuntimeError(
                "these hosts do not exist (yet, or any more): use them inside `with Hosts(...)`"
            )
        return self._running

    def _set_address(self, host: Host) -> None:
        lines = [
            f"addr add {host.address}/24 dev {INTERFACE}",
            # The device's own queue; that of a relayed link must hold what TCP sends in one go.
            f"link set {INTERFACE} mtu {self._mtu} txqueuelen 5000 up",
        ]
        in_network(host.pid, "ip", "-batch", "-", text="\n".join(lines))


@contextlib.contextmanager
def _start_hosts(names: Sequence[str], addresses: Sequence[str]) -> Iterator[tuple[Host, ...]]:
    """Hosts without links; on exit everything that runs on them is killed."""
    with contextlib.ExitStack() as stack:
        with tempfile.NamedTemporaryFile("w", prefix="shardweave-hosts-") as file:
            # Each host sees the file in place of /etc/hosts, also when it has no name any more.
            entries = [("127.0.0.1", "localhost"), *zip(addresses, names, strict=True)]
            file.writelines(f"{address} {name}\n" for address, name in entries)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            keepers = [stack.enter_context(start_keeper(name, file.name)) for name in names]
            for keeper in keepers:
                heard_ready(keeper)
        networks = {network for keeper in keepers if (network := network_id(keeper.pid)) is not None}
        stack.callback(kill_inhabitants, networks)
        yield tuple(
            Host(name, address, keeper.pid)
            for name, address, keeper in zip(names, addresses, keepers, strict=True)
        )
