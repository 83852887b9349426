"""Sends and receives between two ranks of an axis.

[Note: Order is the contract]
    NCCL ignores tags: between two ranks messages pair up in the order in which they were posted. gloo has
    tags but pairs messages of one tag in order as well. So senders and receivers post in one agreed order,
    tags are a second net, and :func:`exchange` posts both directions of one step together, which is what
    NCCL needs in order not to wait for itself.

[Note: Sizes are checked before the wire]
    A receive buffer smaller than the message makes gloo throw in C++, which ends the process with SIGABRT and
    no traceback. Whoever cannot know the size sends a header first, as the pipeline does; in debug mode both ends
    compare dtype and size before they post.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Axis
from .books import entry_of
from .guards import Ticket
from .pending import Pending
from .stream import StreamWork
from .wires import NOTHING, to_peer

__all__ = ["Message", "exchange", "receive", "send", "start_receive", "start_send"]

MAX_TAG = 1 << 30
"""Tags of callers are below it; the collectives of this package use those above."""


@dataclass(frozen=True)
class Message:
    """One send or receive that is yet to be posted, built by :meth:`send` or :meth:`receive`."""

    kind: str
    tensor: Tensor
    axis: Axis
    peer: int
    tag: int = 0

    @classmethod
    def send(cls, tensor: Tensor, axis: Axis, to: int, tag: int = 0) -> Message:
        """``tensor`` goes to position ``to`` of the axis."""
        return cls("send", tensor, axis, to, tag)

    @classmethod
    def receive(cls, tensor: Tensor, axis: Axis, source: int, tag: int = 0) -> Message:
        """``tensor`` is filled with what position ``source`` of the axis sends."""
        return cls("receive", tensor, axis, source, tag)

    def __post_init__(self) -> None:
        if not 0 <= self.peer < self.axis.size or self.peer == self.axis.rank:
            raise ValueError(
                f"{self.kind}: position {self.peer} is not another rank of {self.axis!r}; "
                f"choose one of 0..{self.axis.size - 1}"
            )
        if not 0 <= self.tag < MAX_TAG:
            raise ValueError(f"{self.kind}: tag {self.tag} is not in 0..{MAX_TAG - 1}")


def exchange(messages: Sequence[Message]) -> list[Pending[Tensor]]:
    """Posts several sends and receives together. All of one axis; one handle each, in the same order."""
    if not messages:
        return []
    buffers = [
        _as_sent(message.tensor) if message.kind == "send" else contiguous_like(message.tensor)
        for message in messages
    ]
    axis = messages[0].axis
    operations = [(m.kind, b, m.peer, m.tag) for m, b in zip(messages, buffers, strict=True)]
    works: Sequence[StreamWork]
    tickets: Sequence[Ticket | None] = [None] * len(messages)
    if axis.guard is None:
        works = post(axis, operations)
    else:
        works, tickets = axis.guard.post(axis, operations, post)
    return [
        _pending(message, buffer, work, ticket)
        for message, buffer, work, ticket in zip(messages, buffers, works, tickets, strict=True)
    ]


def start_send(tensor: Tensor, axis: Axis, to: int, tag: int = 0) -> Pending[Tensor]:
    """Launches a send of ``tensor`` to position ``to``. The tensor must not change before ``wait`` returns."""
    return exchange([Message.send(tensor, axis, to, tag)])[0]


def start_receive(tensor: Tensor, axis: Axis, source: int, tag: int = 0) -> Pending[Tensor]:
    """Launches a receive from position ``source`` into ``tensor``, which may be non-contiguous."""
    return exchange([Message.receive(tensor, axis, source, tag)])[0]


def send(tensor: Tensor, axis: Axis, to: int, tag: int = 0) -> Tensor:
    """Sends ``tensor`` to position ``to`` and returns when the buffer may be changed again."""
    return start_send(tensor, axis, to, tag).wait()


def receive(tensor: Tensor, axis: Axis, source: int, tag: int = 0) -> Tensor:
    """Fills ``tensor`` in place with what position ``source`` sends, and returns it."""
    return start_receive(tensor, axis, source, tag).wait()


def post(axis: Axis, operations: Sequence[tuple[str, Tensor, int, int]]) -> list[dist.Work]:
    """Posts (kind, contiguous buffer, peer position, tag) on the axis' group, without counting."""
    peers = [(kind, buffer, axis.ranks[peer], tag) for kind, buffer, peer, tag in operations]
    if peers and peers[0][1].is_cuda:
        calls = {"send": dist.isend, "receive": dist.irecv}
        batch = [dist.P2POp(calls[kind], buffer, peer, axis.group, tag) for kind, buffer, peer, tag in peers]
        works: list[dist.Work | None] = list(dist.batch_isend_irecv(batch))
        # NCCL may coalesce a batch into one work; waiting for it is then waiting for each.
        works = works if len(works) == len(peers) else [works[-1]] * len(peers)
        return [work for work in works if work is not None]
    # Receives first: gloo's connections otherwise carry one direction at a time (on a link of 1 Gbit/s, 49 % of it
    # each way instead of 95 %). Sends and receives do not pair up with each other, so their order is free.
    posted: dict[int, dist.Work] = {}
    for wanted in ("receive", "send"):
        for number, (kind, buffer, peer, tag) in enumerate(peers):
            if kind == wanted:
                call = dist.isend if kind == "send" else dist.irecv
                work = call(buffer, peer, axis.group, tag)
                if work is None:
                    raise RuntimeError(f"this process is not a member of the group of {axis!r}")
                posted[number] = work
    return [posted[number] for number in range(len(peers))]


def _as_sent(tensor: Tensor) -> Tensor:
    """``tensor``, its memory being its values in order: torch may owe it a conjugation or a sign, unlike a receiver."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def contiguous_like(tensor: Tensor) -> Tensor:
    """``tensor`` itself when it can be written as one block of memory, else a new buffer of its shape."""
    return (
        tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def _pending(message: Message, buffer: Tensor, work: StreamWork, ticket: Ticket | None) -> Pending[Tensor]:
    tensor = message.tensor

    def finish() -> Tensor:
        if message.kind == "receive" and buffer is not tensor:
            tensor.detach().copy_(buffer)
        return tensor

    size = tensor.numel() * tensor.element_size()
    sent = to_peer(message.axis, message.peer, size) if message.kind == "send" else NOTHING
    entry = entry_of(message.axis, message.kind, tensor, tensor.numel(), lambda: sent)
    return Pending([work], finish, entry=entry, ticket=ticket)
