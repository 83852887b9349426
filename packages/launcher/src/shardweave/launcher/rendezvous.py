"""Where the ranks of one machine meet: a store on 127.0.0.1 that nothing outside can reach.

Its socket is bound when the rendezvous is made (see `shardweave.comm.store`), so a port that is taken is noticed before
any rank starts.

Each attempt of the ranks gets a store of its own. torch's dynamic rendezvous shares one store between
attempts, where the ranks of a restarted group read the addresses of the dead ones (pytorch #135712).
Several machines need that dynamic rendezvous, and a store prefix per attempt: see `meeting`.
"""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them, untyped
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardweave.comm.store import LOOPBACK, open_listener, serve_store

__all__ = ["LocalRendezvous", "LoopbackError", "PortError"]

STORE_TIMEOUT = 60.0
"""Seconds that a client waits for a key."""


class PortError(OSError):
    """The port that was asked for cannot be had."""


class LoopbackError(OSError):
    """This machine cannot reach itself."""


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of a single agent. ``port`` 0 takes any free one, so that jobs never collide.

    PortError: another process listens on ``port``. LoopbackError: there is no way from this machine to itself.
    """

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id
        self._listener: socket.socket | None = _listen(port)
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the agent's store, which outlives every one of them, and host none."""
        return True

    @property
    def store(self) -> Store:
        """The present attempt's, whole: what ranks write outside of torch's own prefixes is found here."""
        if self._store is None:
            raise RuntimeError("no attempt has begun: there is a store from next_rendezvous() on")
        return self._store

    def get_backend(self) -> str:
        return "local"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store for the next attempt."""
        self._store = None  # the last attempt's: lets go of its port
        listener = self._listener or _listen(self._port)
        self._listener = None
        port = listener.getsockname()[1]
        self._store = serve_store(listener, timeout=STORE_TIMEOUT)
        # The agent's own keys do not mix with the ranks'.
        agent_store = PrefixStore("agent", self._store)
        return RendezvousInfo(agent_store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self.shutdown()

    def close(self) -> None:
        """Lets go of the port."""
        self.shutdown()

    def shutdown(self) -> bool:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._store = None
        return True


def _listen(port: int) -> socket.socket:
    try:
        listener = open_listener(LOOPBACK, port)
    except OSError as error:
        raise PortError(error.errno, error.strerror) from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: is there a way?
        try:
            probe.connect(listener.getsockname())
        except OSError as error:
            listener.close()
            raise LoopbackError(
                error.errno,
                f"{LOOPBACK}, where the ranks of this machine meet, cannot be reached ({error.strerror}): its loopback "
                "interface is down; as root, `ip link set lo up`",
            ) from None
    return listener
