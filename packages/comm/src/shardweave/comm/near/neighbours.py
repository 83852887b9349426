"""Notices between the ranks of a host: what lies where in my memory, and what of yours I have read.

That it has read what lay in another's memory a rank says with its next notice, so places in a region are used in turns,
two of them where every call is waited for at once.

[Note: A neighbour that is gone]
    The kernel closes a dead process' connections, so who waits for it learns that at once. What it had said before
    is still there to be read.

[Note: One polls for all]
    Of the threads that wait one polls the connections, without the lock, and wakes the others. What it waits for may be
    read by a thread that came for something else while it polls, and then there is nothing left to wake it: so who
    reads something while another thread polls rings its bell.

[Note: Who only receives]
    What was read is said with the next notice, and a rank that only receives sends none. So when enough of a peer's
    memory waits for that word it gets one of its own, unless the connection is full: then the next one will do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from torch import Tensor

from .circles import Circle
from .meeting import Contact, meet
from .messages import Arrival, Lines, Messenger
from .region import Region, Window

__all__ = ["Neighbours"]

_HEADER = struct.Struct("<8sQQQ")
"""Circle, number of the call, offset, bytes; behind it the offsets of what was read, 8 bytes each. Of a message: its
group, its tag with :data:`_MESSAGE`, offset, bytes. Number 0: nothing but what was read."""

_MESSAGE = 1 << 63

_NOTHING = bytes(8)
"""The circle of who says only what was read."""

_OWED, _OWED_BYTES = 16, 1 << 21
"""Messages that were read, and bytes of them, at which their sender is told. See [Note: Who only receives]."""

_CROWDED = 8
"""Places in this rank's region at which it looks, before it takes one more, what was said of them."""

_MOST_READ = 1000
"""Offsets in one notice."""

_LONGEST = _HEADER.size + 8 * _MOST_READ


class Neighbours:
    """The other ranks of this one's host, for one mesh. ``timeout``: seconds that a wait may last."""

    def __init__(self, rank: int, region: Region, contacts: Mapping[int, Contact], timeout: float) -> None:
        self._rank, self._region, self._timeout = rank, region, timeout
        self._connections = {peer: connection for peer, (connection, _) in contacts.items()}
        self._windows = {peer: window for peer, (_, window) in contacts.items()}
        self._numbers: dict[bytes, int] = {}
        self._arrived: dict[tuple[int, bytes, int], tuple[int, int]] = {}
        """Offset and bytes, by peer, circle and number."""
        self._read: dict[int, list[int]] = {peer: [] for peer in contacts}
        """Offsets in a peer's region that it is yet to be told of."""
        self._owed: dict[int, int] = dict.fromkeys(contacts, 0)
        """Bytes of messages among them."""
        self._lines = Lines()
        self._gone: set[int] = set()
        self._news = threading.Condition()
        self._someone_polls = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """What the thread that polls is woken by, see [Note: One polls for all]."""
        windows = [region, *self._windows.values()]
        self._close = weakref.finalize(self, _close, list(self._connections.values()), windows, self._bell)
        # A process that a rank forks would keep the connections open when the rank dies.
        os.register_at_fork(after_in_child=self._close)

    @classmethod
    def found(cls, nodes: Sequence[int], rank: int, timeout: float) -> Neighbours | None:
        """Those of global rank ``rank``, ``None``: it has none. Collective over the default process group."""
        region = Region.opened()
        contacts = meet(nodes, region)
        if region is not None and contacts:
            return cls(rank, region, contacts, timeout)
        if region is not None:
            region.close()
        return None

    def circle(self, ranks: Sequence[int], use: str) -> Circle | None:
        """The ranks of an axis in its order, ``None`` where one of them is no neighbour.

        ``use``: keeps circles of the same ranks apart whose calls have no common order.
        """
        if not set(ranks) <= {self._rank, *self._connections}:
            return None
        key = blake2b(f"{use} {tuple(ranks)}".encode(), digest_size=8).digest()
        return Circle(self, key, tuple(ranks), list(ranks).index(self._rank))

    def messenger(self, use: str) -> Messenger:
        """For messages between any two of this host. ``use``: keeps groups apart."""
        return Messenger(self, use)

    @property
    def num_bytes(self) -> int:
        """Of memory that this rank's region takes by now."""
        return os.fstat(self._region.descriptor).st_blocks * 512

    def close(self) -> None:
        """Ends the connections. May be called twice."""
        self._close()

    # --- for circles

    def next_number(self, key: bytes) -> int:
        """Of a circle's next notice."""
        with self._news:
            self._numbers[key] = number = self._numbers.get(key, 0) + 1
        return number

    def place(self, nbytes: int, readers: Sequence[int]) -> int:
        """A place in this rank's region until all ``readers`` have said that they have read it, and this rank, which
        may be the last that does, has called :meth:`let_go`."""
        with self._news:
            return self._take(nbytes, [*readers, self._rank])

    def tensor(self, rank: int, offset: int, like: Tensor) -> Tensor:
        """What lies in a rank's region, as it is; the rank may be this one."""
        window = self._region if rank == self._rank else self._windows[rank]
        return window.tensor(offset, like)

    def tell(self, peers: Iterable[int], key: bytes, number: int, offset: int, nbytes: int) -> None:
        """A notice to each of the ``peers``."""
        with self._news:
            for peer in peers:
                self._send(peer, self._notice(peer, key, number, offset, nbytes))

    def let_go(self, offset: int) -> None:
        """This rank itself does not need what lies there in its own region."""
        with self._news:
            self._region.let_go(offset, self._rank)

    def leave(self, offset: int) -> None:
        """A place of which nobody was told is not needed."""
        with self._news:
            self._region.leave(offset)

    def was_read(self, peer: int, offset: int) -> None:
        """What lay there is not needed any more; the peer is told with the next notice."""
        with self._news:
            self._read[peer].append(offset)

    def heard(self, peer: int, key: bytes, number: int) -> bool:
        """Whether that notice is here."""
        with self._news:
            if (peer, key, number) not in self._arrived:
                self._read_all()
            return (peer, key, number) in self._arrived

    def hear(self, peer: int, key: bytes, number: int) -> tuple[int, int]:
        """Waits for that notice; its offset and bytes.

        Raises:
            RuntimeError: the peer is gone, or did not come in time.
        """
        wanted, end = (peer, key, number), time.monotonic() + self._timeout
        with self._news:
            while wanted not in self._arrived:
                self._more(peer, end)
            return self._arrived.pop(wanted)

    # --- for messages

    def __contains__(self, peer: int) -> bool:
        return peer in self._connections

    def send(self, peer: int, key: bytes, tag: int, address: int, nbytes: int) -> bool:
        """Copies a message to where ``peer`` can read it, and says so; False: the peer is gone."""
        with self._news:
            if self._region.places >= _CROWDED:
                self._read_all()
            offset = self._take(nbytes, (peer,))
            _, start = self._region.mapped(offset + nbytes)
            ctypes.memmove(start + offset, address, nbytes)
            sent = self._send(peer, self._notice(peer, key, tag | _MESSAGE, offset, nbytes))
            if not sent:
                self._region.let_go(offset, peer)
            return sent

    def expect(self, arrival: Arrival) -> None:
        """What comes next of its line is for it."""
        with self._news:
            self._lines.expect(arrival)

    def is_there(self, arrival: Arrival) -> bool:
        """Whether it is."""
        if arrival.found is None:
            with self._news:
                self._read_all()
        return arrival.found is not None

    def arrived(self, arrival: Arrival) -> tuple[int, int]:
        """Waits for it; its offset and bytes.

        Raises:
            RuntimeError: the peer is gone, or did not come in time.
        """
        if arrival.found is None:
            end = time.monotonic() + self._timeout
            with self._news:
                while arrival.found is None:
                    self._more(arrival.peer, end)
        assert arrival.found is not None
        return arrival.found

    def read(self, peer: int, offset: int, nbytes: int, address: int) -> None:
        """Copies what lies in a peer's region to ``address``, and is done with it."""
        memory, start = self._windows[peer].mapped(offset + nbytes)
        ctypes.memmove(address, start + offset, nbytes)
        del memory
        with self._news:
            read = self._read[peer]
            read.append(offset)
            self._owed[peer] += nbytes
            if len(read) >= _OWED or self._owed[peer] >= _OWED_BYTES:
                self._tell_what_was_read(peer)

    # --- with the lock held

    def _take(self, nbytes: int, readers: Iterable[int]) -> int:
        """The offset of a place until all ``readers`` let go of it. What was let go of is heard before it grows."""
        offset = self._region.take(nbytes, readers, grow=False)
        if offset is None:
            self._read_all()
            offset = self._region.take(nbytes, readers, grow=True)
        assert offset is not None
        return offset

    def _more(self, peer: int, end: float) -> None:
        """Reads a notice of ``peer``, or waits for anybody's. RuntimeError: it is gone, or it is later than ``end``."""
        if self._receive(peer):
            return
        if peer in self._gone:
            raise RuntimeError(
                f"Connection closed by peer: rank {peer}, on the host of rank {self._rank}, has ended"
            )
        left = end - time.monotonic()
        if left <= 0:
            raise RuntimeError(
                f"Timed out waiting {self._timeout:g} s for rank {peer}, on the host of rank {self._rank}"
            )
        self._wait(left)

    def _notice(self, peer: int, key: bytes, number: int, offset: int, nbytes: int) -> bytes:
        """With what the peer is yet to be told."""
        notice = _HEADER.pack(key, number, offset, nbytes)
        if not (read := self._read[peer]):
            return notice
        said, self._read[peer] = read[:_MOST_READ], read[_MOST_READ:]
        self._owed[peer] = 0
        return notice + struct.pack(f"<{len(said)}Q", *said)

    def _tell_what_was_read(self, peer: int) -> None:
        """In a notice of its own, if there is room for it."""
        before = self._read[peer]
        notice = self._notice(peer, _NOTHING, 0, 0, 0)
        try:
            self._connections[peer].send(notice)
        except BlockingIOError:
            self._read[peer] = before
        except OSError:  # it is gone, which who waits for it is told
            return

    def _wait(self, seconds: float) -> None:
        """Until there is something to be read, or another thread has read something: [Note: One polls for all]."""
        if self._someone_polls:
            self._news.wait(seconds)
            return
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for peer, connection in self._connections.items():
            if peer not in self._gone:
                poll.register(connection, select.POLLIN)
        self._someone_polls = True
        self._news.release()
        try:
            poll.poll(1e3 * seconds)
        finally:
            self._news.acquire()
            self._someone_polls = False
            with contextlib.suppress(BlockingIOError):  # it did not ring
                os.eventfd_read(self._bell)
            self._news.notify_all()
        self._read_all()

    def _read_all(self) -> None:
        for peer in self._connections:
            while self._receive(peer):
                pass

    def _receive(self, peer: int) -> bool:
        """Reads one notice if there is one."""
        if peer in self._gone:
            return False
        try:
            said = self._connections[peer].recv(_LONGEST)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # it ended without reading all; what it said itself comes after this
        except OSError:
            said = b""
        if self._someone_polls:
            os.eventfd_write(self._bell, 1)
        if not said:
            self._gone.add(peer)
            return False
        key, number, offset, nbytes = _HEADER.unpack_from(said)
        if number & _MESSAGE:
            self._lines.deliver((peer, key, number ^ _MESSAGE), (offset, nbytes))
        elif number:
            self._arrived[peer, key, number] = offset, nbytes
        if len(said) > _HEADER.size:
            for (read,) in struct.iter_unpack("<Q", said[_HEADER.size :]):
                self._region.let_go(read, peer)
        return True

    def _send(self, peer: int, notice: bytes) -> bool:
        """Whether it was sent: to a peer that is gone nothing is, and who waits for it is told."""
        end = time.monotonic() + self._timeout
        while peer not in self._gone:
            try:
                self._connections[peer].send(notice)
                return True
            except BlockingIOError:  # it has hundreds of notices to read
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"Timed out waiting {self._timeout:g} s for rank {peer} to read what it was sent"
                    ) from None
                self._read_all()
                writable = select.poll()
                writable.register(self._connections[peer], select.POLLOUT)
                # Milliseconds, and then looks again: the peer may wait in the same way for this rank.
                writable.poll(50)
            except OSError:
                return False
        return False


def _close(connections: Sequence[socket.socket], windows: Sequence[Window], bell: int) -> None:
    for connection in connections:
        connection.close()
    for window in windows:
        window.close()
    os.close(bell)
