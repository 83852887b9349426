"""How the ranks of a host find each other: a connection for each pair, over which each hands the other its memory.

Connections are sockets of the kernel's own ("abstract" Unix sockets): they have no file, so nothing is left behind, and
their names are drawn at random. Who connects has to be a process of the same user.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist

from .region import Region, Window

__all__ = ["Contact", "meet"]

_TOKEN = 16
"""Bytes of a name, and of the hash that says who can reach each other."""

_PATIENCE = 30.0
"""Seconds in which ranks that just spoke to each other have to connect."""

Contact = tuple[socket.socket, Window]
"""The connection to a neighbour, and its memory."""


def meet(nodes: Sequence[int], region: Region | None) -> dict[int, Contact]:
    """This rank's neighbours by global rank. Collective over the default process group, which is of the CPU.

    ``nodes``: the node of every global rank. ``region``: this rank's memory; ``None``: it has none, so no neighbours.
    Neighbours share a node, a boot of one kernel, a network namespace and a user. Where some of them do not get through
    to each other, none of those has neighbours.
    """
    rank, token = dist.get_rank(), os.urandom(_TOKEN)
    listener = None if region is None else _listener(token, len(nodes))
    # Its own token is nobody else's place.
    place = token if listener is None else _place() or token
    everyone = _gathered(token + place)
    tokens, places = [one[:_TOKEN] for one in everyone], [one[_TOKEN:] for one in everyone]
    near = [r for r, at in enumerate(nodes) if at == nodes[rank] and places[r] == places[rank]]
    contacts: dict[int, Contact] = {}
    through = True
    try:
        if region is not None and listener is not None and len(near) > 1:
            _connect(rank, near, tokens, listener, region, contacts)
    except OSError:
        through = False
    finally:
        if listener is not None:
            listener.close()
    answers = _gathered(bytes([through]))
    if not all(answers[r][0] for r in near):
        for connection, window in contacts.values():
            connection.close()
            window.close()
        contacts.clear()
    return contacts


def _connect(
    rank: int,
    near: Sequence[int],
    tokens: Sequence[bytes],
    listener: socket.socket,
    region: Region,
    contacts: dict[int, Contact],
) -> None:
    """To those of lower rank, then waits for those of higher rank: nobody waits for one who waits."""
    hello = struct.pack("<q", rank) + tokens[rank]
    opened = {}
    for peer in near:
        if peer < rank:
            opened[peer] = _socket()
            opened[peer].connect(_address(tokens[peer]))
            socket.send_fds(opened[peer], [hello], [region.descriptor])
    awaited = {peer for peer in near if peer > rank}
    end = time.monotonic() + _PATIENCE
    while awaited:
        listener.settimeout(max(0.01, end - time.monotonic()))
        connection, _ = listener.accept()
        said, descriptors = _received(connection)
        peer = struct.unpack("<q", said[:8])[0] if len(said) == len(hello) else -1
        if peer in awaited and said[8:] == tokens[peer] and descriptors and _is_ours(connection):
            awaited.remove(peer)
            contacts[peer] = connection, Window(descriptors[0])
            socket.send_fds(connection, [hello], [region.descriptor])
        else:
            connection.close()
    for peer, connection in opened.items():
        connection.settimeout(_PATIENCE)
        said, descriptors = _received(connection)
        if not descriptors:
            raise OSError(f"rank {peer} gave no memory")
        contacts[peer] = connection, Window(descriptors[0])
    for connection, _ in contacts.values():
        connection.setblocking(False)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    connection.settimeout(_PATIENCE)
    said, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
    return said, descriptors


def _listener(token: bytes, backlog: int) -> socket.socket | None:
    """``None`` on systems without such sockets."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    listener = _socket()
    try:
        listener.bind(_address(token))
        listener.listen(backlog)
    except OSError:
        listener.close()
        return None
    return listener


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(token: bytes) -> bytes:
    return b"\0shardweave-" + token.hex().encode()


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _place() -> bytes | None:
    """The same for processes that can reach each other by such sockets: kernel, network namespace, user. ``None``: the
    system does not say, as in a container that hides it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return None
    return blake2b(f"{boot} {network} {os.getuid()}".encode(), digest_size=_TOKEN).digest()


def _gathered(mine: bytes) -> list[bytes]:
    """What every rank of the world gives, equally long."""
    everyone = torch.empty(dist.get_world_size() * len(mine), dtype=torch.uint8)
    dist.all_gather_single(everyone, torch.tensor(list(mine), dtype=torch.uint8))
    return [bytes(row) for row in everyone.view(-1, len(mine)).tolist()]
