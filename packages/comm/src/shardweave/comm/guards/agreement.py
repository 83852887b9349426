"""Debug mode: before anything is sent, the ranks show each other what they are about to do.

Two ranks that call a collective with tensors of other types get garbage, with other sizes a process that dies in C++,
and with other collectives a hang. So each sends a :class:`Record` of its call to the others and looks at theirs. Only
when all are alike the call goes on; else every one of them raises the same error.

The records travel over a gloo group of the whole world that nothing else uses, also on a CUDA machine, with tags made
of the axis' ranks: any two calls over the same ranks meet in the same exchange, whatever they are, and axes without a
group of their own are like all others. A rank that does not come is the watchdog's matter.

[Note: A message is agreed on beside the program]
    A collective may wait at its launch until all members have launched it. A message may not: receives are posted
    ahead of what they wait for, and a pipeline would wait in a circle. So a thread for each message waits for the
    other end's record, and then posts the real send or receive; ``wait`` waits for both. Messages of one tag are
    posted in their order.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..stream import StreamWork
from ..text import ranks_text
from .call_sites import call_site
from .progress import Ticket
from .records import LENGTH, Record, mismatch

__all__ = ["AGREEING", "AgreedMessage", "Agreement"]

AGREEING = "shardweave-agreement"
"""Name of the threads that messages are agreed on in."""

_HALF = 1 << 30
"""Tags of collectives' records are below it, those of messages from there on."""


class Agreement:
    """The exchange of records; made by all ranks of the world together, and closed by all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group``: gloo, of the whole world, used for nothing else."""
        self._group = group
        self._rank = dist.get_rank()
        self._last: dict[int, threading.Event] = {}

    def agree(self, ticket: Ticket) -> None:
        """Returns when all members of the axis are about to make the same call.

        Raises:
            CollectiveMismatch: they are not; on every member, with one text.
        """
        axis = ticket.call.axis
        mine = Record.of(self._rank, ticket.number, ticket.call.fields, call_site())
        tag = crc32(axis.members.encode()) % _HALF
        others = [rank for rank in axis.ranks if rank != self._rank]
        arriving = {rank: self._receive(rank, tag) for rank in others}
        packed = _tensor(mine.pack())
        sending = [self._send(packed, rank, tag) for rank in others]
        records = {self._rank: mine}
        for rank, (buffer, work) in arriving.items():
            work.wait()
            records[rank] = Record.unpack(rank, _bytes(buffer))
        for work in sending:
            work.wait()
        error = mismatch(
            [records[rank] for rank in axis.ranks], f"collective {ticket.number} of {ranks_text(axis.ranks)}"
        )
        if error is not None:
            raise error

    def message(self, ticket: Ticket, post: Callable[[], StreamWork], tag: int) -> AgreedMessage:
        """Begins to agree on a send or receive; ``post`` posts it. ``tag``: the caller's."""
        call, peer = ticket.call, ticket.call.peer
        if peer is None:
            raise ValueError(f"{call.kind} is no message")
        ends = (self._rank, peer) if call.kind == "send" else (peer, self._rank)
        channel = _HALF + crc32(f"{call.axis.name} {ends} {tag}".encode()) % _HALF
        end = (
            f"{call.kind} of shape {tuple(call.shape)} {'to' if call.kind == 'send' else 'from'} rank {peer}"
        )
        # Without a number: messages of different tags may be sent and received in different orders.
        mine = Record.of(self._rank, 0, call.fields, call_site(), end)
        buffer, arriving = self._receive(peer, channel)
        packed = _tensor(mine.pack())
        sending = self._send(packed, peer, channel)

        def compare() -> None:
            arriving.wait()
            sending.wait()
            theirs = Record.unpack(peer, _bytes(buffer))
            ordered = sorted((mine, theirs), key=lambda record: record.rank)
            error = mismatch(ordered, f"a message from rank {ends[0]} to rank {ends[1]}")
            if error is not None:
                raise error

        message = AgreedMessage(compare, post, self._last.get(channel))
        self._last[channel] = message.settled
        return message

    def close(self) -> None:
        """Destroys the group."""
        dist.destroy_process_group(self._group)

    def _receive(self, rank: int, tag: int) -> tuple[Tensor, dist.Work]:
        buffer = torch.empty(LENGTH, dtype=torch.uint8)
        return buffer, _there(dist.irecv(buffer, rank, self._group, tag))

    def _send(self, packed: Tensor, rank: int, tag: int) -> dist.Work:
        return _there(dist.isend(packed, rank, self._group, tag))


class AgreedMessage:
    """A send or receive that is posted when both ends agree. See [Note: A message is agreed on beside the program]."""

    def __init__(
        self, compare: Callable[[], None], post: Callable[[], StreamWork], before: threading.Event | None
    ) -> None:
        self.settled = threading.Event()
        """Set when it has been posted, or never will be."""
        self._work: StreamWork | None = None
        self._error: BaseException | None = None
        steps = (compare, post, before)
        threading.Thread(target=self._run, args=steps, name=AGREEING, daemon=True).start()

    def wait(self) -> bool:
        """Returns when the message has been sent or received."""
        self.settled.wait()
        if self._error is not None:
            raise self._error
        return self._work is None or self._work.wait()

    def is_completed(self) -> bool:
        """Whether ``wait`` is known to return at once."""
        return self.settled.is_set() and (self._work is None or self._work.is_completed())

    def _run(
        self, compare: Callable[[], None], post: Callable[[], StreamWork], before: threading.Event | None
    ) -> None:
        try:
            compare()
            if before is not None:
                before.wait()
            self._work = post()
        except BaseException as error:
            self._error = error
        finally:
            self.settled.set()


def _there(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not a member of the group that records are exchanged in")
    return work


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _bytes(buffer: Tensor) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), buffer.numel())
