"""Sends and receives between two ranks of an axis.

[Note: Order is the contract]
    NCCL ignores tags: between two ranks messages pair up in the order in which they were posted. gloo has
    tags but pairs messages of one tag in order as well. So senders and receivers post in one agreed order,
    tags are a second net, and :func:`exchange` posts both directions of one step together, which is what
    NCCL needs in order not to wait for itself.

[Note: Sizes are checked before the wire]
    A receive buffer smaller than the message makes gloo throw in C++, which ends the process with SIGABRT and
    no traceback. Whoever cannot know the size sends a header first, as the pipeline does; in debug mode both ends
    compare dtype and size before they post. Between ranks of one host that is an error that names both sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Axis
from .books import entry_of
from .guards import Ticket
from .pending import Pending
from .stream import StreamWork
from .wires import NOTHING, Sent, to_peer

__all__ = ["Message", "exchange", "receive", "send", "start_receive", "start_send"]

MAX_TAG = 1 << 30
"""Tags of callers are below it; the collectives of this package use those above."""


class Message(NamedTuple):
    """One send or receive that is yet to be posted, built by :meth:`send` or :meth:`receive`.

    These raise ValueError for a position that is not another rank of the axis, and for a tag out of range.
    """

    kind: str
    tensor: Tensor
    axis: Axis
    peer: int
    tag: int = 0

    @classmethod
    def send(cls, tensor: Tensor, axis: Axis, to: int, tag: int = 0) -> Message:
        """``tensor`` goes to position ``to`` of the axis."""
        _check("send", axis, to, tag)
        return cls("send", tensor, axis, to, tag)

    @classmethod
    def receive(cls, tensor: Tensor, axis: Axis, source: int, tag: int = 0) -> Message:
        """``tensor`` is filled with what position ``source`` of the axis sends."""
        _check("receive", axis, source, tag)
        return cls("receive", tensor, axis, source, tag)


def _check(kind: str, axis: Axis, peer: int, tag: int) -> None:
    if not 0 <= peer < len(axis.ranks) or peer == axis.rank:
        raise ValueError(
            f"{kind}: position {peer} is not another rank of {axis!r}; choose one of 0..{axis.size - 1}"
        )
    if not 0 <= tag < MAX_TAG:
        raise ValueError(f"{kind}: tag {tag} is not in 0..{MAX_TAG - 1}")


def exchange(messages: Sequence[Message]) -> list[Pending[Tensor]]:
    """Posts several sends and receives together. All of one axis; one handle each, in the same order."""
    if not messages:
        return []
    axis = messages[0].axis
    operations = [
        (kind, _as_sent(tensor) if kind == "send" else contiguous_like(tensor), peer, tag)
        for kind, tensor, _, peer, tag in messages
    ]
    works: Sequence[StreamWork]
    tickets: Sequence[Ticket | None] = [None] * len(messages)
    if axis.guard is None:
        works = _posted(axis, operations)
    else:
        works, tickets = axis.guard.post(axis, operations, _posted)
    return [
        _pending(message, operation[1], work, ticket)
        for message, operation, work, ticket in zip(messages, operations, works, tickets, strict=True)
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


def _posted(axis: Axis, operations: Sequence[tuple[str, Tensor, int, int]]) -> Sequence[StreamWork]:
    """Each through memory where its ends share some, else by the backend; arguments as in :func:`post`."""
    messenger = axis.messenger
    if messenger is None:
        return post(axis, operations)
    works: list[StreamWork | None] = []
    others = []
    for operation in operations:
        kind, buffer, position, tag = operation
        peer, work = axis.ranks[position], None
        if messenger.takes(buffer, peer):
            work = (messenger.send if kind == "send" else messenger.receive)(buffer, peer, tag)
        else:
            others.append(operation)
        works.append(work)
    rest = iter(post(axis, others))
    return [next(rest) if work is None else work for work in works]


def post(axis: Axis, operations: Sequence[tuple[str, Tensor, int, int]]) -> list[dist.Work]:
    """Posts (kind, contiguous buffer, peer position, tag) on the axis' group, without counting."""
    if not operations:
        return []
    if axis.group is None:
        raise RuntimeError(f"{axis!r} has no other rank to send to or receive from")
    if operations[0][1].is_cuda:
        calls = {"send": dist.isend, "receive": dist.irecv}
        batch = [
            dist.P2POp(calls[kind], buffer, axis.ranks[peer], axis.group, tag)
            for kind, buffer, peer, tag in operations
        ]
        works: list[dist.Work | None] = list(dist.batch_isend_irecv(batch))
        # NCCL may coalesce a batch into one work; waiting for it is then waiting for each.
        works = works if len(works) == len(operations) else [works[-1]] * len(operations)
        return [work for work in works if work is not None]
    # The group's own methods: what dist.isend and dist.irecv add, a third of their time, is known of an axis.
    send, receive, ranks = axis.group.send, axis.group.recv, axis.group_ranks
    posted: dict[int, dist.Work] = {}
    # Receives first: gloo's connections otherwise carry one direction at a time (on a link of 1 Gbit/s, 49 % of it
    # each way instead of 95 %). Sends and receives do not pair up with each other, so their order is free.
    for number, (kind, buffer, peer, tag) in enumerate(operations):
        if kind == "receive":
            posted[number] = receive([_as_real(buffer)], ranks[peer], tag)
    for number, (kind, buffer, peer, tag) in enumerate(operations):
        if kind == "send":
            posted[number] = send([_as_real(buffer)], ranks[peer], tag)
    return [posted[number] for number in range(len(operations))]


def _as_real(buffer: Tensor) -> Tensor:
    """Backends know no complex numbers."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _as_sent(tensor: Tensor) -> Tensor:
    """``tensor``, its memory being its values in order: torch may owe it a conjugation or a sign, unlike a receiver."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def contiguous_like(tensor: Tensor) -> Tensor:
    """``tensor`` itself when it can be written as one block of memory, else a new buffer of its shape."""
    return (
        tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def _pending(message: Message, buffer: Tensor, work: StreamWork, ticket: Ticket | None) -> Pending[Tensor]:
    kind, tensor, axis, peer, _ = message
    elements = tensor.numel()
    if kind == "send":
        entry = entry_of(
            axis, kind, tensor, elements, partial(to_peer, axis, peer, elements * tensor.itemsize)
        )
        return Pending([work], partial(_left, tensor, buffer), entry=entry, ticket=ticket)
    entry = entry_of(axis, kind, tensor, elements, _nothing)
    return Pending([work], partial(_arrived, tensor, buffer), entry=entry, ticket=ticket)


def _nothing() -> Sent:
    """What a receive sends."""
    return NOTHING


def _left(tensor: Tensor, buffer: Tensor) -> Tensor:
    """``tensor``, that was sent from ``buffer``, which lives until here."""
    return tensor


def _arrived(tensor: Tensor, buffer: Tensor) -> Tensor:
    """``tensor``, with what arrived in ``buffer`` where that is another."""
    if buffer is not tensor:
        tensor.detach().copy_(buffer)
    return tensor
