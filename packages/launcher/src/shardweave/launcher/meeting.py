"""Where the machines of a job meet: a store on one of them, and torch elastic's dynamic rendezvous in it.

::

    machine 0 (holds the store)   machine 1         machine 2
    agent ──── HOST:PORT <─────── agent <────────── agent          who is there, in which order, who waits to come in
      ranks      ^ a prefix per attempt  ranks        ranks        addresses, stops, verdicts of that attempt

An attempt of the ranks has a prefix of its own in the store, by the number of the rendezvous' round, which all machines
share; torch would let a restarted group read the addresses of the dead one (pytorch #135712), and tells attempts apart
by a count that is each agent's own.

[Note: A machine is lost within seconds]
    Every agent renews its place each second, and has lost it after three seconds without. torch asks for 5 and 15. The
    times are those of the machines' clocks, which have to agree to a second; agents look at that when they arrive.
    A rendezvous is complete two seconds after enough machines are there, or at once when all are.

The store has no authentication, like all of torch's: its port is for a trusted network, and it is bound to one address.
"""

from __future__ import annotations

import errno
import fcntl
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them, untyped
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from shardweave.comm.store import LOOPBACK, is_loopback, open_listener, serve_store
from shardweave.launcher.prepare import MachineError

__all__ = ["STORE_GONE", "Endpoint", "Meeting", "interface_of"]

STORE_GONE = (DistError, RendezvousConnectionError, RendezvousStateError)
"""What is raised when the machine that holds the store does not answer."""

KEEP_ALIVE = 1
"""Seconds between signs of life."""
LOST_AFTER = 3
"""So many of them missing, and a machine is lost."""
LAST_CALL = 2
"""Seconds in which more machines may come once there are enough."""
SKEW = 1.0
"""Seconds by which two machines' clocks may differ."""

_STORE_TIMEOUT = 30.0
_LOOK_EVERY = 0.2
_ANSWER = 5.0
"""Seconds in which a store answers that is there."""
_TELL_EVERY = 10.0
_LOCAL_NAMES = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class Endpoint:
    """HOST:PORT of the store."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """ValueError: it is not of that form."""
        host, colon, port = text.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError(f"{text!r} is not HOST:PORT with a port from 1 to 65535, such as node0:29400")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Meeting(RendezvousHandler):
    """The rendezvous of a job over `least` to `most` machines.

    Args:
        endpoint: of the store; the machine whose address it is holds it.
        job: the name of the job; another one at the same store is refused.
        patience: seconds to wait for the store, and for enough machines.
        say: gets a sentence when either takes long.

    Raises:
        MachineError: the port is taken, the host is not known or leads nowhere, or no store answers in time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        job: str,
        least: int,
        most: int,
        *,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        self.endpoint, self.least, self.most = endpoint, least, most
        self._job, self._patience, self._say = job, patience, say
        address = _address(endpoint, most)
        store = _serve(endpoint, address)
        self.hosting = store is not None
        """Whether this machine holds the store."""
        self.store: Store = _connect(endpoint, address, patience, say) if store is None else store
        """Of the whole job."""
        self.address = address if self.hosting else _own_address(address, endpoint.port)
        """This machine's, as the others see it."""
        self._check_job()
        self._check_clock()
        # A client of its own: while the other one waits for a key, signs of life must pass.
        backend = C10dRendezvousBackend(self._another_client(), job)
        self._handler = DynamicRendezvousHandler.from_backend(
            job,
            self.store,
            backend,
            least,
            most,
            self.address,
            RendezvousTimeout(
                join=timedelta(seconds=patience),
                last_call=timedelta(seconds=LAST_CALL),
                close=timedelta(seconds=5),
                heartbeat=timedelta(seconds=LOST_AFTER),
            ),
            keep_alive_interval=KEEP_ALIVE,
            keep_alive_max_attempt=LOST_AFTER,
        )
        # Ranks meet in this store, too. The handler would open another, on every interface.
        self._handler._shared_tcp_store_server = self.store
        self._handler._bootstrap_store_info = RendezvousStoreInfo(address, endpoint.port)
        self._round = -1
        self._places: dict[object, int] = {}

    @property
    def round(self) -> int:
        """The number of the attempt, the same on all its machines."""
        return self._round

    def attempt_store(self, name: str) -> Store:
        """A part of the store that is the present attempt's alone."""
        return PrefixStore(f"attempt-{self._round}/{name}", self.store)

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the store that is there, and host none."""
        return True

    def get_backend(self) -> str:
        return str(self._handler.get_backend())

    def get_run_id(self) -> str:
        return self._job

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other machines.

        Raises:
            MachineError: not enough of them came in time.
            RendezvousClosedError: the job has ended.
        """
        done, began = threading.Event(), time.monotonic()

        there = 1  # this one, which leaves before it gives up

        def tell() -> None:
            nonlocal there
            told = began
            while not done.wait(_LOOK_EVERY):
                there, now = self._there() or there, time.monotonic()
                if now - told > _TELL_EVERY:
                    told = now
                    self._say(
                        f"waiting at {self.endpoint} for at least {self.least} machines, {now - began:.0f} s so far: "
                        f"{there} there"
                    )

        threading.Thread(target=tell, name="meeting-teller", daemon=True).start()
        try:
            info: RendezvousInfo = self._handler.next_rendezvous()
        except RendezvousTimeoutError:
            raise MachineError(
                f"after {time.monotonic() - began:.0f} s only {there} of at least {self.least} machines were "
                f"at {self.endpoint} (--nnodes, --rdzv-timeout); start the same command on the others, or ask for fewer"
            ) from None
        finally:
            done.set()
        state = self._handler._state_holder.state
        self._round, self._places = state.round, dict(state.participants)
        return info

    def present(self) -> set[int]:
        """The places of the attempt's machines that are still there, by their signs of life; all others are lost."""
        self.num_nodes_waiting()  # reads the state, at most once a second
        state = self._handler._state_holder.state
        if state.round != self._round:
            return set()
        return {place for node, place in self._places.items() if node in state.participants}

    def num_nodes_waiting(self) -> int:
        """Machines that wait to come in."""
        return int(self._handler.num_nodes_waiting())

    def is_closed(self) -> bool:
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        self._handler.set_closed()

    def shutdown(self) -> bool:
        """Ends the job for all machines."""
        return bool(self._handler.shutdown())

    def leave(self) -> None:
        """Ends the signs of life, and lets go of the store."""
        self._handler._stop_heartbeats()

    def _another_client(self) -> Store:
        store: Store = self.store.clone()  # type: ignore[attr-defined] # not in torch's stubs
        return store

    def _there(self) -> int:
        return len(self._handler._state_holder.state.participants)

    def _check_job(self) -> None:
        found = self.store.compare_set("job", "", self._job).decode()
        if found != self._job:
            raise MachineError(
                f"the store at {self.endpoint} is of another job: `--rdzv-id {found}`, and this one is {self._job}; "
                "use another port, or the same run.name or --rdzv-id on all machines"
            )

    def _check_clock(self) -> None:
        """The clock of the machine that holds the store, against this one's: signs of life are told by them."""
        if self.hosting:
            threading.Thread(target=_answer_clocks, args=(self._another_client(),), daemon=True).start()
            return
        asked = time.time()
        number = self.store.add("clock/asked", 1)
        try:
            self.store.wait([f"clock/{number}"], timedelta(seconds=5))
        except DistError:
            return  # its machine is busy; the check is no reason to stop
        told, answered = float(self.store.get(f"clock/{number}")), time.time()
        apart = max(asked - told, told - answered)
        if apart > SKEW:
            raise MachineError(
                f"the clocks of this machine and of {self.endpoint.host} are {apart:.1f} s apart, and at most "
                f"{SKEW:g} s are allowed, as machines tell by them who is lost; set them (NTP)"
            )


def _answer_clocks(store: Store) -> None:
    """On the machine that holds the store, as long as it lives: what time it is."""
    answered = 0
    try:
        while True:
            asked = store.add("clock/asked", 0)
            while answered < asked:
                answered += 1
                store.set(f"clock/{answered}", repr(time.time()))
            time.sleep(0.1)
    except DistError:  # the end
        return


def _address(endpoint: Endpoint, most: int) -> str:
    try:
        address = str(socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise MachineError(
            f"`--rdzv-endpoint {endpoint}`: this machine does not know the host {endpoint.host}: {error.strerror}"
        ) from None
    if most > 1 and is_loopback(address) and not endpoint.host.startswith(_LOCAL_NAMES):
        raise MachineError(
            f"`--rdzv-endpoint {endpoint}`: on this machine the name {endpoint.host} means {address} (see /etc/hosts), "
            "which no other machine reaches; give the address of a network interface instead"
        )
    return address


def _serve(endpoint: Endpoint, address: str) -> Store | None:
    """The store, if the address is this machine's; None: another machine, or another process here, has it."""
    try:
        listener = open_listener(address, endpoint.port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        if error.errno != errno.EADDRINUSE:
            raise MachineError(f"`--rdzv-endpoint {endpoint}`: {error.strerror}") from None
        if not _is_store(address, endpoint.port):
            raise MachineError(
                f"`--rdzv-endpoint {endpoint}`: {error.strerror}, which is no store of a job; use another port"
            ) from None
        return None
    return serve_store(listener, timeout=_STORE_TIMEOUT)


def _is_store(address: str, port: int) -> bool:
    try:
        _client(address, port)
    except (DistError, TimeoutError):
        return False
    return True


def _connect(endpoint: Endpoint, address: str, patience: float, say: Callable[[str], None]) -> Store:
    began = told = time.monotonic()
    while True:
        try:
            socket.create_connection((address, endpoint.port), 5.0).close()
            return _client(address, endpoint.port)
        except (OSError, DistError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        waited = time.monotonic() - began
        if waited > patience:
            raise MachineError(
                f"`--rdzv-endpoint {endpoint}`: nothing answered there for {waited:.0f} s ({reason}); start the same "
                f"command on {endpoint.host}, which holds the store, and see that the port is open between the machines"
            )
        if time.monotonic() - told > _TELL_EVERY:
            told = time.monotonic()
            say(f"waiting for the store at {endpoint}, {waited:.0f} s so far: {reason}")
        time.sleep(0.2)


def _client(address: str, port: int) -> Store:
    """A client of the store. torch's waits for ever where something else accepts the connection and says nothing.

    Raises:
        DistError: what answers is no store.
        TimeoutError: nothing answers.
    """
    made: queue.Queue[Store | Exception] = queue.Queue()

    def connect() -> None:
        try:
            patience = timedelta(seconds=_STORE_TIMEOUT)
            made.put(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience))
        except Exception as error:
            made.put(error)

    threading.Thread(target=connect, name="store-client", daemon=True).start()
    try:
        found = made.get(timeout=_ANSWER)
    except queue.Empty:
        raise TimeoutError(errno.ETIMEDOUT, "the connection is accepted, and no store answers") from None
    if isinstance(found, Exception):
        raise found
    return found


def _own_address(address: str, port: int) -> str:
    """The address with which this machine reaches another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, for ``GLOO_SOCKET_IFNAME``; None: unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(
                    probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15])
                )  # SIOCGIFADDR
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return "lo" if address.startswith(LOOPBACK[:4]) else None
