"""Messages with file descriptors over a Unix socket: a header that carries the descriptors, then the bytes.

``multiprocessing.connection`` frames messages too, but passes descriptors through a helper process and
thread, and a zygote has no threads.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["readable", "receive", "send"]

_HEADER = struct.Struct("!QI")  # length of the message, number of descriptors
_MAX_DESCRIPTORS = 250  # the kernel takes 253 in one message


def send(sock: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Sends any picklable ``message``; the receiver gets duplicates of the ``descriptors``."""
    if len(descriptors) > _MAX_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} descriptors in one message; the limit is {_MAX_DESCRIPTORS}")
    body = pickle.dumps(message)
    socket.send_fds(sock, [_HEADER.pack(len(body), len(descriptors))], list(descriptors))
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its descriptors, or None when the other side is gone."""
    header, descriptors, _, _ = socket.recv_fds(sock, _HEADER.size, _MAX_DESCRIPTORS)
    header += _exactly(sock, _HEADER.size - len(header)) if header else b""
    if len(header) < _HEADER.size:
        return None
    length, count = _HEADER.unpack(header)
    body = _exactly(sock, length)
    if len(body) < length or len(descriptors) < count:
        return None
    # The socket pair is private to one job: both ends are our own processes.
    return pickle.loads(body), list(descriptors)  # noqa: S301


def readable(sources: Sequence[Any], timeout: float | None) -> list[Any]:
    """Those of ``sources`` (sockets, descriptors) with data or closed; waits ``timeout`` seconds for one."""
    poll = select.poll()  # not select(): descriptors above 1023 are common under pytest
    by_number = {}
    for source in sources:
        number = source if isinstance(source, int) else source.fileno()
        by_number[number] = source
        poll.register(number, select.POLLIN | select.POLLHUP)
    ready = poll.poll(None if timeout is None else max(0, round(timeout * 1000)))
    return [by_number[number] for number, _ in ready]


def _exactly(sock: socket.socket, length: int) -> bytes:
    """``length`` bytes, or fewer when the other side is gone."""
    parts = []
    while length > 0:
        part = sock.recv(min(length, 1 << 20))
        if not part:
            break
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
