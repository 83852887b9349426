"""What a mesh hangs on its axes so that mistakes and hangs are told in words.

Two independent parts: the watchdog, which is on by default and costs 2 to 3 µs a call, and the agreement before
each call, which is for finding mistakes and costs a message to every member. Every call passes through one function
here at its launch; see `progress` for what happens while it is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from ..axis import Axis
from ..stream import StreamWork
from .agreement import Agreement
from .board import open_board
from .calls import Call
from .progress import Progress, Ticket
from .watchdog import Watchdog

__all__ = ["Guard", "watch_limit"]

Operation: TypeAlias = tuple[str, Tensor, int, int]
"""``send`` or ``receive``, a contiguous buffer, the peer's position, the tag."""
Post: TypeAlias = Callable[[Axis, Sequence[Operation]], Sequence[StreamWork]]

_SHARE = 5
"""The default limit is this part of the timeout: time for a look into the report before the job ends of it."""


class Guard:
    """The guard of one mesh on one rank.

    ``limit``: seconds of waiting after which the watchdog reports; 0: there is none.
    """

    def __init__(self, limit: float) -> None:
        self._rank, world = dist.get_rank(), dist.get_world_size()
        self.progress = Progress(self._rank)
        self._agreement: Agreement | None = None
        self._stop: Callable[[], object] = lambda: None
        if limit:
            watchdog = Watchdog(open_board(self._rank), self.progress, self._rank, world, limit)
            # Also when the mesh is forgotten, and before the interpreter goes, at whose end threads must not run.
            self._stop = weakref.finalize(self, watchdog.stop)
            watchdog.start()

    @property
    def debug(self) -> bool:
        """Whether calls are agreed on before they are launched."""
        return self._agreement is not None

    def begin_debug(self, timeout: float) -> None:
        """From here on calls are agreed on. Collective over the world. ``timeout``: seconds, of an agreement."""
        limit = timedelta(seconds=timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        options._timeout = limit
        group = dist.new_group(backend="gloo", timeout=limit, pg_options=options)
        if not isinstance(group, dist.ProcessGroup):
            raise RuntimeError("the group of the whole world does not have this rank")
        self._agreement = Agreement(group)

    def building(self) -> Ticket:
        """As a context: the time in which the groups of the mesh are built."""
        world = tuple(range(dist.get_world_size()))
        axis = Axis("world", world, self._rank, group=dist.group.WORLD)
        return self.progress.launch(Call("building the groups of the mesh", axis))

    def launch(
        self, axis: Axis, kind: str, tensor: Tensor, shape: Sequence[int], options: Mapping[str, Any]
    ) -> Ticket:
        """Every collective comes here when its own arguments are right, before anything of it is sent.

        ``shape`` and ``options``: what all members have to see alike, see :class:`Call`.

        Raises:
            CollectiveMismatch: in debug mode, when the members of the axis do not all make this call.
        """
        ticket = self.progress.launch(Call(kind, axis, tensor.dtype, shape, options), tensor.is_cuda)
        if self._agreement is not None:
            with ticket:
                self._agreement.agree(ticket)
        return ticket

    def post(
        self, axis: Axis, operations: Sequence[Operation], post: Post
    ) -> tuple[Sequence[StreamWork], Sequence[Ticket]]:
        """Every batch of sends and receives comes here; ``post`` posts it. The works and tickets, in its order.

        In debug mode each waits for its other end to agree, and waiting for it may raise CollectiveMismatch.
        """
        tickets = [
            self.progress.launch(
                Call(kind, axis, buffer.dtype, buffer.shape, peer=axis.ranks[peer]), buffer.is_cuda
            )
            for kind, buffer, peer, _ in operations
        ]
        if self._agreement is None:
            with tickets[0]:
                return post(axis, operations), tickets
        # NCCL pairs messages by the order of their posting, and ends no process over their sizes: they go at once.
        posted = list(post(axis, operations)) if operations[0][1].is_cuda else []
        works = []
        for index, (operation, ticket) in enumerate(zip(operations, tickets, strict=True)):
            begin = (
                partial(posted.__getitem__, index) if posted else partial(_post_one, post, axis, operation)
            )
            works.append(self._agreement.message(ticket, begin, tag=operation[3]))
        return works, tickets

    def close(self) -> None:
        """Ends the watchdog, and destroys what debug mode built. May be called twice."""
        self._stop()
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()


def watch_limit(watch: float | None, timeout: float) -> float:
    """Seconds after which the watchdog reports; 0: never.

    ``watch``: what the caller asked for; ``None``: a fifth of ``timeout``.

    >>> watch_limit(None, 300.0)
    60.0
    """
    if watch is None:
        return timeout / _SHARE
    if not 0 <= watch < timeout:
        raise ValueError(
            f"watch={watch:g}: seconds of waiting before the watchdog reports have to be below timeout={timeout:g}, "
            "after which the wait fails; use 0 for no watchdog"
        )
    return watch


def _post_one(post: Post, axis: Axis, operation: Operation) -> StreamWork:
    return post(axis, [operation])[0]
