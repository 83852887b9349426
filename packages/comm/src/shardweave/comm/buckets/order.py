"""When each bucket's gradients are reduced, in one order on all ranks.

A bucket is launched when the gradients of all its parameters are final, so that its reduction travels while the
backward pass computes the buckets before it. What arrives in which order differs between ranks (unused
parameters, another branch taken), and collectives that ranks launch in different orders hang or, worse, add up
different things. So the *order* never depends on arrival:

[Note: Cycles]
    A cycle launches every bucket exactly once, last bucket first. A bucket that is ready waits for the buckets before
    it in that order; closing the cycle launches what is left, with zeros for what never came. The next cycle
    begins with calls that all ranks make equally often: with the step, with forgetting a pending gradient, and, where
    each micro-batch is reduced, at the end of the accumulation's window. ::

        arrival     b3 ready, b1 ready, b2 ready, ......  end of backward
        launches    b3,                 b2, b1,           b0 (a parameter of it was not used)

    A cycle is closed at the end of the backward pass already when nothing is held or deferred any more. So all
    ranks have launched the same by then, and a collective of the user's own between ``backward`` and the step
    meets its like on the other ranks.

[Note: Late gradients]
    What arrives after its bucket was launched in the same cycle (a second ``backward`` without an accumulation's
    window) is collected in a buffer of its own. The owner finds out, on all ranks at once, whether any rank has such
    gradients, and if so all run one more cycle. The results are added up, so no gradient is lost; the price is
    a second reduction.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..pending import Pending, wait_when_dropped
from ..readiness import Subscription, gradient_work
from .memory import BucketMemory

__all__ = ["OrderedReduction", "Reducible"]


class Reducible(Protocol):
    """A bucket, as far as its launching is concerned."""

    @property
    def local(self) -> BucketMemory:
        """Where its gradients arrive."""
        ...

    def start_reduction(self) -> tuple[Tensor, Pending[Tensor]]:
        """Takes the local gradients and launches their reduction; returns the buffer that it reads."""
        ...

    def accept(self, buffer: Tensor, pending: Pending[Tensor]) -> None:
        """Waits for a reduction and adds its result to what came before."""
        ...


class OrderedReduction:
    """Listens to the gradients of the buckets and launches their reductions. See [Note: Cycles].

    ``buckets``: in forward order. ``alone``: nothing travels, as on an axis of one rank; gradients are left in
    ``.grad`` until :meth:`finish`. ``eager``: reduce each micro-batch of an accumulation's window. ``early``: launch
    during the backward pass; otherwise all at its end, in the same order. ``in_flight``: launched reductions whose
    buffers may exist at once, where their memory is freed afterwards: the backward pass then waits for a slow link
    instead of filling the memory; ``None``: as many as there are. ``as_it_comes``: whether a result may be taken as
    soon as it is there, which is earlier on some ranks; not where taking it launches something.
    """

    def __init__(
        self,
        buckets: Sequence[Reducible],
        *,
        alone: bool,
        eager: bool = False,
        early: bool = True,
        in_flight: int | None = None,
        as_it_comes: bool = True,
    ) -> None:
        self._order = tuple(reversed(buckets))
        self._alone, self._eager, self._early = alone, eager, early
        self._at_once = len(buckets) if in_flight is None else in_flight
        self._as_it_comes = as_it_comes
        self._next = 0
        self._ready: list[set[int]] = [set() for _ in buckets]
        self._expected = [len(bucket.local.parameters) for bucket in self._order]
        self._backward = -1
        self._in_flight: deque[tuple[tuple[Reducible, Tensor], Pending[Tensor]]] = deque()
        wait_when_dropped(self, self._in_flight)  # after a backward pass without a step
        self._accumulating = 0
        self._touched = False
        self.collecting = False
        """Whether nothing is launched but by :meth:`finish`. See [Note: Late gradients]."""
        self.held_whole = False
        """Whether someone else, a pipeline, held gradients over its micro-batches. Where those end is not said, so
        they cannot close a cycle, and gradients stay whole."""
        self._subscriptions: list[Subscription] = []
        for number, bucket in enumerate(self._order):
            for slot, parameter in enumerate(bucket.local.parameters):
                listener = _listener(weakref.ref(self), number, slot)
                self._subscriptions.append(
                    gradient_work(parameter).subscribe(parameter, listener, every=True)
                )

    def detach(self) -> None:
        """Stops listening."""
        for subscription in self._subscriptions:
            subscription.remove()

    def expect_trained(self) -> None:
        """Buckets wait for gradients of the parameters that require them now; the others' are zeros, as if unused.

        On all ranks alike, between a cycle's end and the next backward pass.
        """
        self._expected = [sum(p.requires_grad for p in bucket.local.parameters) for bucket in self._order]

    def begin_accumulation(self) -> None:
        """Gradients that arrive from now on are not the last ones."""
        self._accumulating += 1
        for bucket in self._order:
            for parameter in bucket.local.parameters:
                gradient_work(parameter).hold()

    def end_accumulation(self, *, completed: bool) -> None:
        """Takes one :meth:`begin_accumulation` back; ``completed``: the micro-batch ran to its end."""
        self._accumulating -= 1
        for bucket in self._order:
            for parameter in bucket.local.parameters:
                gradient_work(parameter).release()
        if completed and self._eager and not self._accumulating:
            # Launched here without any gradient too, and on one rank: there is something to forget everywhere.
            self._touched = True
            self._close()
            self._next = 0

    def finish(self) -> None:
        """Closes the cycle and waits for everything that was launched."""
        self._close()
        self._next = 0
        while self._in_flight:
            self._retire()
        self._touched = False

    def discard(self) -> None:
        """Brings what is under way to its end, so that it can be forgotten. See [Note: Cycles]."""
        if self._touched:
            self.finish()
        for ready in self._ready:
            ready.clear()

    @property
    def late(self) -> int:
        """Buckets with gradients that the last :meth:`finish` did not include. See [Note: Late gradients]."""
        launched = max(self._next, len(self._in_flight))
        return launched + sum(bucket.local.waiting for bucket in self._order)

    @property
    def under_way(self) -> bool:
        """Whether reductions were launched whose results nobody has taken yet."""
        return bool(self._in_flight)

    def arrived(self, number: int, slot: int, parameter: Tensor) -> None:
        """Autograd, or a deferred weight-gradient, has added something to ``parameter.grad``."""
        local = self._order[number].local
        if self._alone:
            local.adopt(slot)  # nothing travels, and until the step everyone can look at .grad
        elif gradient_work(parameter).final or (self._eager and self._accumulating):
            local.adopt(slot, final=True)
            self._touched = self._touched or not self.collecting
            ready = self._ready[number]
            ready.add(slot)
            if not self.collecting:
                if self._early and number == self._next and len(ready) >= self._expected[number]:
                    self._advance()
                self._watch_backward()
        else:
            local.adopt(slot)
            self.held_whole |= self._eager and not self._accumulating

    def _advance(self) -> None:
        while self._next < len(self._order):
            if len(self._ready[self._next]) < self._expected[self._next]:
                return
            self._launch()

    def _watch_backward(self) -> None:
        """Once in each backward pass: asks autograd to call back at its end."""
        current = _current_backward()
        if current not in (-1, self._backward):
            self._backward = current
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        left = [parameter for bucket in self._order[self._next :] for parameter in bucket.local.parameters]
        if all(gradient_work(parameter).final for parameter in left):
            self._close()

    def _launch(self) -> None:
        bucket = self._order[self._next]
        self._ready[self._next].clear()
        self._next += 1
        while self._in_flight and (
            len(self._in_flight) >= self._at_once or (self._as_it_comes and self._in_flight[0][1].done())
        ):
            self._retire()
        buffer, pending = bucket.start_reduction()
        self._in_flight.append(((bucket, buffer), pending))

    def _retire(self) -> None:
        (bucket, buffer), pending = self._in_flight.popleft()
        bucket.accept(buffer, pending)

    def _close(self) -> None:
        while self._next < len(self._order):
            self._launch()


def _current_backward() -> int:
    """A number that is another one in each backward pass, -1 outside of any."""
    return torch._C._current_graph_task_id()


def _listener(order: weakref.ref[OrderedReduction], number: int, slot: int) -> Callable[[Tensor], None]:
    """Does nothing any more once the owner is gone, so that the module can be given another one."""

    def listen(parameter: Tensor) -> None:
        alive = order()
        if alive is not None:
            alive.arrived(number, slot, parameter)

    return listen
