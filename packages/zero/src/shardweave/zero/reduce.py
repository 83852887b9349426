"""When each unit's gradients are reduced, in one order on all ranks.

A unit is launched when the gradients of all its parameters are final, so that its reduction travels while the
backward pass computes the units before it. What arrives in which order differs between ranks (unused
parameters, another branch taken), and collectives that ranks launch in different orders hang or, worse, add up
different things. So the *order* never depends on arrival:

[Note: Cycles]
    A cycle launches every unit exactly once, last unit first. A unit that is ready waits for the units before
    it in that order; closing the cycle launches what is left, with zeros for what never came. The next cycle
    begins with calls that all ranks make equally often: with ``step``, with ``zero_grad`` over a pending
    gradient, and, where gradients are sharded between micro-batches, at the end of ``accumulate``. ::

        arrival     u3 ready, u1 ready, u2 ready, ......  end of backward
        launches    u3,                 u2, u1,           u0 (a parameter of it was not used)

    A cycle is closed at the end of the backward pass already when nothing is held or deferred any more. So all
    ranks have launched the same by then, and a collective of the user's own between ``backward`` and ``step``
    meets its like on the other ranks.

[Note: Late gradients]
    What arrives after its unit was launched in the same cycle (a second ``backward`` without ``accumulate``)
    is collected in a buffer of its own. ``step`` finds out together with the global norm whether any rank
    has such gradients, and if so all ranks run one more cycle. The results are added up, so no gradient is
    lost; the price is a second reduction, which ``accumulate`` avoids.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardweave.comm import Axis, Pending, Subscription, gradient_work

from .unit import Unit
from .units import partial_axes

__all__ = ["Reducer"]

_IN_FLIGHT = 4
"""Launched reductions whose buffers may exist at once; more would hold all gradients in memory on a slow link."""


class Reducer:
    """Listens to the gradients of the units and reduces them over the data axis and their partial axes.

    ``op``: ``mean`` or ``sum`` over the data axis; over partial axes it is always the sum. ``eager``: inside
    ``accumulate``, reduce each micro-batch.
    """

    def __init__(self, units: Sequence[Unit], axis: Axis, op: str, *, eager: bool) -> None:
        self._order = tuple(reversed(units))
        self._axis, self._op, self._eager = axis, op, eager
        self._next = 0
        self._ready: list[set[int]] = [set() for _ in units]
        self._backward = -1
        self._in_flight: deque[tuple[Unit, Tensor, Pending[Tensor]]] = deque()
        self._accumulating = 0
        self._touched = False
        self.held_whole = False
        """Whether someone else, a pipeline, held gradients over its micro-batches. Where those end is not said, so
        they cannot close a cycle, and gradients stay whole."""
        self._subscriptions: list[Subscription] = []
        for number, unit in enumerate(self._order):
            for slot, parameter in enumerate(unit.parameters):
                listener = _listener(weakref.ref(self), number, slot)
                self._subscriptions.append(
                    gradient_work(parameter).subscribe(parameter, listener, every=True)
                )

    def detach(self) -> None:
        """Stops listening."""
        for subscription in self._subscriptions:
            subscription.remove()

    def begin_accumulation(self) -> None:
        """Gradients that arrive from now on are not the last ones."""
        self._accumulating += 1
        for unit in self._order:
            for parameter in unit.parameters:
                gradient_work(parameter).hold()

    def end_accumulation(self, *, completed: bool) -> None:
        """Takes one :meth:`begin_accumulation` back; ``completed``: the micro-batch ran to its end."""
        self._accumulating -= 1
        for unit in self._order:
            for parameter in unit.parameters:
                gradient_work(parameter).release()
        if completed and self._eager and not self._accumulating:
            # Launched here without any gradient too, and on one rank: there is something to forget everywhere.
            self._touched = True
            self._close()
            self._next = 0

    def finish(self) -> None:
        """Closes the cycle, waits for everything and sums over the partial axes."""
        self._complete_cycle()
        self._sum_partial()
        for unit in self._order:
            unit.complete_gradient()

    def discard(self) -> None:
        """Brings what is under way to its end and forgets it. See [Note: Cycles]."""
        if self._touched:
            self._complete_cycle()
        for ready in self._ready:
            ready.clear()
        for unit in self._order:
            unit.drop_gradient()

    @property
    def late(self) -> int:
        """Units with gradients that the last :meth:`finish` did not include. See [Note: Late gradients]."""
        return sum(unit.local.waiting for unit in self._order)

    def arrived(self, number: int, slot: int, parameter: Tensor) -> None:
        """Autograd, or a deferred weight-gradient, has added something to ``parameter.grad``."""
        unit = self._order[number]
        unit.local.adopt(slot)
        if self._axis.size == 1:
            return  # nothing travels, and until the step everyone can look at .grad
        if gradient_work(parameter).final or (self._eager and self._accumulating):
            self._touched = True
            self._ready[number].add(slot)
            self._advance()
            self._watch_backward()
        elif self._eager and not self._accumulating:
            self.held_whole = True

    def _advance(self) -> None:
        while self._next < len(self._order):
            unit, ready = self._order[self._next], self._ready[self._next]
            if len(ready) < len(unit.parameters):
                return
            self._launch()

    def _watch_backward(self) -> None:
        """Once in each backward pass: asks autograd to call back at its end."""
        current = _current_backward()
        if current not in (-1, self._backward):
            self._backward = current
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        left = [parameter for unit in self._order[self._next :] for parameter in unit.parameters]
        if all(gradient_work(parameter).final for parameter in left):
            self._close()

    def _launch(self) -> None:
        unit = self._order[self._next]
        self._ready[self._next].clear()
        self._next += 1
        while self._in_flight and (len(self._in_flight) >= _IN_FLIGHT or self._in_flight[0][2].done()):
            self._retire()
        self._in_flight.append((unit, *unit.start_reduction(self._op)))

    def _retire(self) -> None:
        unit, buffer, pending = self._in_flight.popleft()
        unit.accept(buffer, pending)

    def _complete_cycle(self) -> None:
        self._close()
        self._next = 0
        while self._in_flight:
            self._retire()
        self._touched = False

    def _close(self) -> None:
        while self._next < len(self._order):
            self._launch()

    def _sum_partial(self) -> None:
        for axis in partial_axes(unit.plan for unit in self._order):
            concerned = [unit for unit in self._order if axis in unit.plan.key.partial]
            pending = [unit.start_partial_sum(axis) for unit in concerned]
            for one in pending:
                if one is not None:
                    one.wait()


def _current_backward() -> int:
    """A number that is another one in each backward pass, -1 outside of any."""
    return torch._C._current_graph_task_id()


def _listener(reducer: weakref.ref[Reducer], number: int, slot: int) -> Callable[[Tensor], None]:
    """Does nothing any more once the optimizer is gone, so that the module can be given another one."""

    def listen(parameter: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.arrived(number, slot, parameter)

    return listen
