"""Sends and receives between ranks of one host, through memory.

The sender copies to where the receiver can read it, and says so: for it the message is over then, whether or not the
other one has come to its receive. The receiver copies what lies there. Nobody's thread but the two callers' has to
wake up, where a socket takes those of the backend on either end.

Messages of one tag pair up in the order in which they were sent and in which their receives were launched, as gloo's
do. What is too large for it goes by the backend; both ends know sizes, so they agree on that.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from .neighbours import Neighbours

__all__ = ["LONGEST", "Arrival", "Lines", "Messenger", "Receiving", "Sending"]

LONGEST = 1 << 22
"""Bytes of a message: as much of a region is taken until it was read."""


class Arrival:
    """A receive that was launched, and what has come for it."""

    __slots__ = ("found", "key", "peer", "tag")

    def __init__(self, peer: int, key: bytes, tag: int) -> None:
        self.peer, self.key, self.tag = peer, key, tag
        self.found: tuple[int, int] | None = None
        """Offset in the peer's region and bytes."""


class _Line(NamedTuple):
    """Of one peer's messages of one tag: those for which nobody has asked, or who has asked. One of them is empty."""

    arrived: deque[tuple[int, int]]
    wanted: deque[Arrival]


class Lines:
    """Pairs up messages and receives of one peer, group and tag, in the order of each. Not for two threads at once."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, bytes, int], _Line] = {}
        """Those of which one end is here and the other is not."""

    def expect(self, arrival: Arrival) -> None:
        """A receive was launched: it gets what came first, or what will come."""
        key = arrival.peer, arrival.key, arrival.tag
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = _Line(deque(), deque([arrival]))
        elif line.arrived:
            arrival.found = line.arrived.popleft()
            if not line.arrived:
                del self._lines[key]
        else:
            line.wanted.append(arrival)

    def deliver(self, key: tuple[int, bytes, int], found: tuple[int, int]) -> None:
        """A message came, of this peer, group and tag: it is for who asked first, or to be asked for."""
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = _Line(deque([found]), deque())
        elif line.wanted:
            line.wanted.popleft().found = found
            if not line.wanted:
                del self._lines[key]
        else:
            line.arrived.append(found)


class Sending:
    """A send: it is over when it has been launched."""

    __slots__ = ("_gone",)

    def __init__(self, gone: str = "") -> None:
        self._gone = gone

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once: always."""
        return True

    def wait(self) -> bool:
        """Returns at once.

        Raises:
            RuntimeError: the peer was gone when it was sent.
        """
        if self._gone:
            raise RuntimeError(self._gone)
        return True


_SENT = Sending()
"""One for all that went well."""


class Receiving:
    """A receive into ``buffer``, which is contiguous."""

    __slots__ = ("_arrival", "_buffer", "_neighbours")

    def __init__(self, neighbours: Neighbours, arrival: Arrival, buffer: Tensor) -> None:
        self._neighbours, self._arrival = neighbours, arrival
        self._buffer: Tensor | None = buffer

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._neighbours.is_there(self._arrival)

    def wait(self) -> bool:
        """Returns when the buffer is filled.

        Raises:
            RuntimeError: the peer is gone, did not come in time, or sent something of another size.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return True
        peer = self._arrival.peer
        offset, nbytes = self._neighbours.arrived(self._arrival)
        if nbytes != buffer.nbytes:
            raise RuntimeError(
                f"rank {peer} sent a message of {nbytes} bytes where this rank receives {buffer.nbytes}: both have to "
                "know the size; CommOptions(debug=True) tells which calls they make"
            )
        self._neighbours.read(peer, offset, nbytes, buffer.data_ptr())
        return True


class Messenger:
    """This rank's messages of one process group, which ``use`` names."""

    def __init__(self, neighbours: Neighbours, use: str) -> None:
        self._neighbours = neighbours
        self._key = blake2b(f"messages {use}".encode(), digest_size=8).digest()

    def takes(self, buffer: Tensor, peer: int) -> bool:
        """Whether a contiguous ``buffer`` is passed between this and global rank ``peer`` in this way."""
        return buffer.is_cpu and 0 < buffer.nbytes <= LONGEST and peer in self._neighbours

    def send(self, buffer: Tensor, peer: int, tag: int) -> Sending:
        """Copies it, and tells the peer."""
        if self._neighbours.send(peer, self._key, tag, buffer.data_ptr(), buffer.nbytes):
            return _SENT
        return Sending(f"Connection closed by peer: rank {peer}, on this host, has ended")

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Receiving:
        """To be waited for."""
        arrival = Arrival(peer, self._key, tag)
        self._neighbours.expect(arrival)
        return Receiving(self._neighbours, arrival, buffer)
