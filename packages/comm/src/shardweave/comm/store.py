"""The store where ranks meet, on the address it was told and no other.

torch's ``TCPStore`` has no authentication: who reaches its port reads and changes what ranks agree on. Told a host
name, it still listens on every interface of the machine; handed a socket, it uses that one. So this module binds the
socket. It is also how a port that is taken is noticed before any rank starts.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import warnings
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them, untyped

__all__ = [
    "LOOPBACK",
    "PREFIX",
    "environment_store",
    "is_loopback",
    "loopback_interface",
    "open_listener",
    "serve_store",
]

LOOPBACK = "127.0.0.1"

PREFIX = "SHARDWEAVE_STORE_PREFIX"
"""Environment: where in the store at ``MASTER_ADDR`` ranks meet, when it has seen other ranks before. torch's agents
share one store between attempts, in which the ranks of a later one read the addresses of the dead (pytorch #135712)."""


def open_listener(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket that listens on one address of this machine. ``port`` 0: a free one, see ``getsockname()``.

    Raises:
        OSError: the port is taken, or does not exist, or the address is not this machine's; the text says which.
    """
    if not 0 <= port < 2**16:
        raise OSError(errno.EINVAL, f"port {port} does not exist; ports go from 1 to 65535")
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a job may follow the last at once
        listener.bind(where)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"port {port} on {address} is taken by another process") from error
        raise OSError(error.errno, f"port {port} on {address} cannot be used: {error.strerror}") from error
    return listener


def serve_store(listener: socket.socket, *, timeout: float, world_size: int | None = None) -> TCPStore:
    """A store that this process serves on ``listener``, which it takes over, and is a client of.

    ``timeout``: seconds that it waits for a key. ``world_size``: waits until so many clients are there; ``None``: not.
    """
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        world_size=world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=world_size is not None,
        master_listen_fd=listener.detach(),
    )


def environment_store(timeout: float) -> Store | None:
    """The store of ranks that meet at ``MASTER_ADDR`` and ``MASTER_PORT``, served by the first rank on that address.

    ``None`` where torchrun's agent serves one, which torch joins by itself. With :data:`PREFIX` in the environment it
    is the part of an agent's store under that prefix. An address that is not of the first rank's
    machine (a service in front of it, say) cannot be listened on: then it is every interface, with a warning.
    """
    prefix, agents = os.environ.get(PREFIX), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if agents and prefix is None:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if prefix is not None:
        client = TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        return PrefixStore(prefix, client)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank > 0:
        return TCPStore(address, port, world_size=world, is_master=False, timeout=timedelta(seconds=timeout))
    try:
        listener = open_listener(address, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        warnings.warn(
            f"MASTER_ADDR={address} is not an address of this machine: the store listens on all of them, and whoever "
            "reaches one can change what ranks agree on",
            stacklevel=3,
        )
        listener = open_listener("0.0.0.0", port)
    return serve_store(listener, timeout=timeout, world_size=world)


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own, which no other machine reaches."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(str(where[0]).startswith("127.") or where[0] == "::1" for *_, where in found)


def loopback_interface() -> str:
    """The name of the interface that :data:`LOOPBACK` belongs to, for ``GLOO_SOCKET_IFNAME``."""
    return "lo0" if sys.platform == "darwin" else "lo"
