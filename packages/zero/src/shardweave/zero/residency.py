"""When a unit's parameters are gathered, and when they are released (ZeRO stage 3).

A unit is *in use* while a module that owns it runs forward, and in a backward pass from the first node that reads it
until all its gradients have arrived (deferred weight-gradients too) and, if some parameters are frozen, those of the
module's inputs. It is gathered when a use begins, unless it was gathered ahead, and released when the last one ends::

    forward      gather 0 | run 0        run 1        run 2             the order of uses is noted: the unit that
                          | gather 1     gather 2                       followed last time is gathered ahead
    backward     run 2                   run 1        run 0
                 gather 1                gather 0

What is used next is not released in between: unit 2 stays for the backward pass that follows, if it did last time.

What is gathered and not in use is *idle*: gathered ahead, kept, or used outside of any module that owns it. Where a
unit that is needed would go beyond ``max_live_parameters``, idle ones are released, those unused for longest first.

[Note: One order]
    Gathering is collective, so all ranks have to begin uses in the same order; that order may change from step to step.
    What is gathered ahead, kept and released follows from the order alone. A use that does not follow the one before as
    it did last time is a surprise, and any difference between ranks begins with one, on one of them at least. So
    before anything is gathered after a surprise, all agree on it (``same_order.py``). Units that are always gathered
    do not count: one rank alone may read those.

[Note: Gradients of gradients]
    With ``create_graph`` the backward pass is recorded, and nobody watches over the nodes that it makes. So what such a
    pass reads stays gathered until the step, or until gradients are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from .gathered import GatheredParameters
from .guard import Resident
from .member import Member
from .options import Gathering
from .same_order import SameOrder
from .use_order import REDUCTION, Use, UseOrder

__all__ = ["Residency"]


class Residency:
    """Gathers and releases the units of one optimizer, on one rank. See [Note: One order].

    ``flats``: of the units, in forward order; ``labels``: what to call them; ``owners``: how many modules own each;
    ``same``: over the ranks that gather together; ``along``: numbers of those that are in use from a pass' beginning to
    its end, or nearly. Nothing but persistent units is gathered afterwards.
    """

    def __init__(
        self,
        flats: Sequence[GatheredParameters],
        labels: Sequence[str],
        owners: Sequence[int],
        options: Gathering,
        same: SameOrder,
        along: Collection[int] = (),
    ) -> None:
        self._options = options
        self._check_bound(flats, labels)
        self.members = tuple(
            Member(number, flat, label, along=number in along, owners=owned, residency=self)
            for number, (flat, label, owned) in enumerate(zip(flats, labels, owners, strict=True))
        )
        self._live = 0
        self._kept: set[int] = set()
        self._clock = 0
        self._order, self._same = UseOrder(), same
        self._strays: list[Member] = []
        self._awaited: list[Member] = []
        """Idle ones that are used next: gathered ahead, or not released after their last use."""
        self.contexts = 0
        """How many of :meth:`whole` are open."""
        self._tasks: set[int] = set()
        self._surprise = ""
        """A use that did not follow as it did last time, and that the ranks have not agreed on yet."""
        self._parted = False
        self.on_end: Callable[[], None] = lambda: None
        """Called by :meth:`end`."""
        for member in self.members:
            member.guard()
        self.gather_persistent()

    # -- uses ------------------------------------------------------------------------------------------

    def enter(self, wanted: Sequence[Member], *, outermost: bool) -> None:
        """A module that owns ``wanted`` begins its forward; ``outermost``: one that no other module called."""
        if outermost and current_backward() < 0:
            self._drop_stale()
        for member in wanted:
            member.users += 1
            member.count_trained()
        for member in wanted:
            if member.users == 1 and member.task is None:
                self._require(member)

    def leave(self, wanted: Sequence[Member], *, last: bool) -> None:
        """That forward has ended, also by an exception. ``last``: what is idle is not needed soon."""
        task = current_backward()
        for member in wanted:
            member.users -= 1
            if not member.users and task >= 0 and member.task is None:
                self._pin(member, task)  # recomputed in a backward pass, which is about to read it
            self._release(member)
        if last and task < 0:
            self.release_idle()

    def use(self, member: Member, along: Sequence[Resident] = ()) -> None:
        """A function reads parameters of a unit that no module uses now, ``along`` with those of others."""
        task = current_backward()
        if task >= 0:
            self._pin(member, task)
            return
        if self._always(member) and member.flat.whole:
            return
        strays, self._strays = self._strays, [member]
        for stray in strays:
            if stray is not member and any(stray is other for other in along):
                self._strays.append(stray)
            elif stray is not member:
                self._release(stray)
        if not member.flat.whole or member in self._awaited:
            self._require(member)

    def use_in_backward(self, member: Member) -> None:
        """An autograd node that reads the unit's parameters is about to run."""
        task = current_backward()
        if task >= 0:
            self._pin(member, task)
        else:
            self.use(member)

    def arrived(self, member: Member, slot: int) -> None:
        """A parameter's gradient arrived, or a part of it that had been put off."""
        if member.task is None:
            self._begin_arrivals(member, current_backward())
        member.arrived.add(slot)
        self._end_if_read(member)

    def passed(self, member: Member, owner: int) -> None:
        """The gradients of the inputs of one of the modules that own it are complete."""
        member.passed.add(owner)
        self._end_if_read(member)

    def reducing(self) -> None:
        """Gradients are about to be reduced, at the end of a step or a micro-batch."""
        if not self._order.note(REDUCTION):
            self._surprise = self._surprise or self._words()
        self._settle()

    def waiting_to_reduce(self) -> AbstractContextManager[None]:
        """Around reducing: a rank that gathers something instead, and asks, is told."""
        return self._same.waiting("nothing before gradients are reduced")

    @contextmanager
    def whole(self, wanted: Sequence[Member]) -> Iterator[None]:
        """Everything of ``wanted`` is gathered inside, whatever the bound; collective."""
        every = len(wanted) == len(self.members)
        labels = "everything" if every else " and ".join(member.label for member in wanted)
        self._surprise = self._surprise or f"{labels}, in full_parameters()"
        self._settle()
        self.contexts += 1
        for member in wanted:
            member.users += 1
            self._start(member)
            member.flat.gather()
        try:
            yield
        finally:
            self.contexts -= 1
            for member in wanted:
                member.users -= 1
                self._release(member, stays=False)

    # -- between steps ---------------------------------------------------------------------------------

    def forget(self) -> None:
        """Other values are in the shards now: everything is released, but what a context has, which gets them."""
        for member in self.members:
            member.task, member.held = None, False
            member.arrived.clear()
        self._kept.clear()
        self.release_idle(persistent=True)
        for member in self.members:
            if member.flat.live:  # inside a context
                member.flat.gather_again()

    def let_go(self) -> None:
        """There are no graphs of gradients any more."""
        for member in self.members:
            if member.held:
                member.held = False
                self._release(member)

    def gather_persistent(self) -> None:
        """Gathers the units that are always there; collective."""
        persistent = [member for member in self.members if member.size <= self._options.persistent_parameters]
        for member in persistent:
            self._start(member)
        for member in persistent:
            member.flat.gather()

    def release_idle(self, *, persistent: bool = False) -> None:
        """Releases everything that nobody uses and that is not kept; ``persistent``: those units as well."""
        self._strays.clear()
        self._awaited.clear()
        # An exception ends a pass before it is complete: then no backward pass follows.
        turns = any(use.backward for use in self._order.foreseen(1))
        for member in self.members:
            if persistent and not member.in_use:
                self._free(member)
            else:
                self._release(member, stays=turns)

    def end(self) -> None:
        """Everything is gathered for good, parameters are plain ones, and no module tells any more; collective."""
        self.on_end()
        for member in self.members:
            self._start(member)
        for member in self.members:
            member.flat.gather()
            member.unguard()

    @property
    def live(self) -> int:
        """Elements that are gathered now."""
        return self._live

    # -- how -------------------------------------------------------------------------------------------

    def _require(self, member: Member) -> None:
        """Begins a use: the values are there afterwards, and those of the next use are on their way."""
        if self._always(member) and member.flat.whole:
            return
        surprised = not self._order.note(Use(member.number, current_backward() >= 0, torch.is_grad_enabled()))
        if surprised:
            self._surprise = self._surprise or self._words()
        self._clock += 1
        member.used_at = self._clock
        if member in self._awaited:
            self._awaited.remove(member)
        if not member.flat.live and not self._fits(member) and not self._make_room(member):
            raise RuntimeError(self._too_much(member))
        if self._awaited or not member.flat.live:
            self._settle()
        if surprised:
            stale, self._awaited = self._awaited, []
            for other in stale:
                self._release(other)
        self._start(member)
        if not member.flat.whole:
            with self._same.waiting(self._words()):
                member.flat.gather()
        self._gather_ahead()

    def _gather_ahead(self) -> None:
        """What follows in this pass, as it did last time, is on its way afterwards."""
        ahead = 0
        for use in self._order.rest_of_pass(len(self.members)):
            member = self.members[use.number]
            if ahead == self._options.prefetch:
                return
            if member.flat.live and (member.in_use or member.along):
                continue  # it is there for another reason, and waiting for its turn hides nothing
            ahead += 1
            if not member.flat.live:
                if not self._fits(member):
                    return  # nothing is released for what may not be needed
                self._settle()
                self._awaited.append(member)
                self._start(member)

    def _settle(self) -> None:
        """Before something collective: agrees on what came as a surprise. See [Note: One order].

        Raises where the ranks part. From then on nothing is waited for: what is under way never comes.
        """
        if self._surprise:
            self._parted = True
            self._same.check(self._surprise)
            self._parted = False
            self._surprise = ""

    def _words(self) -> str:
        return self._order.in_words([member.label for member in self.members])

    def _too_much(self, member: Member) -> str:
        used = [other for other in self.members if self._is_held(other, member) and other is not member]
        needed = sum(other.size for other in used) + member.size
        return (
            f"max_live_parameters={self._options.max_live_parameters}: {member.label} is needed while "
            f"{', '.join(other.label for other in used)} are in use, which takes {needed}; raise it, or cut the model "
            "into smaller units"
        )

    def _check_bound(self, flats: Sequence[GatheredParameters], labels: Sequence[str]) -> None:
        limit = self._options.max_live_parameters
        if limit is None:
            return
        sizes = [flat.plan.length for flat in flats]
        always = sum(size for size in sizes if size <= self._options.persistent_parameters)
        for size, label in zip(sizes, labels, strict=True):
            if max(size, always) > limit or (
                size > self._options.persistent_parameters and size + always > limit
            ):
                raise ValueError(
                    f"max_live_parameters={limit}: {label} has {size} elements, and {always} more are always gathered; "
                    f"use {size + always} or more, or cut the model into smaller units"
                )

    def _start(self, member: Member) -> None:
        if not member.flat.live:
            self._live += member.size
            member.flat.start_gather()

    def _make_room(self, member: Member) -> bool:
        """Releases idle units until ``member`` fits under the bound; whether it does."""
        idle = [other for other in self.members if other.flat.live and not self._is_held(other, member)]
        idle.sort(key=lambda other: other.used_at)
        for other in idle:
            if self._fits(member):
                break
            self._kept.discard(other.number)
            self._free(other)
        return self._fits(member)

    def _fits(self, member: Member) -> bool:
        return self._within(self._live + member.size)

    def _within(self, live: int) -> bool:
        """Whether so many elements may be gathered; outside of a context, that is."""
        limit = self._options.max_live_parameters
        return limit is None or live <= limit

    def _is_held(self, other: Member, needed: Member) -> bool:
        """Whether ``other`` has to stay while ``needed`` is gathered: a function may read both at once."""
        together = needed in self._strays and other in self._strays
        return other.in_use or together or self._always(other)

    def _pin(self, member: Member, task: int) -> None:
        if member.task is None:
            member.task = task
            self._begin_arrivals(member, task)
            member.passed.clear()
            member.count_trained()
            if not member.users and not (member.held and member.flat.whole):
                self._require(member)
            if task not in self._tasks:
                self._tasks.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ended(task))

    def _end_if_read(self, member: Member) -> None:
        if member.task is not None and member.is_read:
            member.task = None
            member.arrived.clear()
            self._release(member)

    def _begin_arrivals(self, member: Member, task: int) -> None:
        if member.arrived_in != task:
            member.arrived_in = task
            member.arrived.clear()

    def _backward_ended(self, task: int) -> None:
        self._tasks.discard(task)
        for member in self.members:
            if member.task == task and not member.owed:
                member.task = None
                member.arrived.clear()
                self._release(member)
        if not self._tasks:
            self.release_idle()

    def _drop_stale(self) -> None:
        """A backward pass that failed has left its units in use."""
        if self._tasks:
            self._tasks.clear()
            for member in self.members:
                if not member.owed:
                    member.task = None
            self.release_idle()

    def _release(self, member: Member, *, stays: bool = True) -> None:
        """Frees a unit that is not in use any more, unless it is to be kept, or ``stays`` because it is used next."""
        if member.in_use or not member.flat.live or self._always(member) or member.number in self._kept:
            return
        if stays and member.number in self._next():
            if member not in self._awaited:
                self._awaited.append(member)
            return
        kept = sum(self.members[number].size for number in self._kept)
        if kept + member.size <= self._options.keep_gathered and self._within(self._live):
            self._kept.add(member.number)
        else:
            self._free(member)

    def _next(self) -> set[int]:
        """Numbers of the units with which the backward pass began last time, if it is about to."""
        last = self._order.last
        if last is None or last.backward:
            return set()
        return {use.number for use in self._order.foreseen(1 + self._options.prefetch) if use.backward}

    def _free(self, member: Member) -> None:
        if member.flat.live and not self._parted:
            self._live -= member.size
            member.flat.release()

    def _always(self, member: Member) -> bool:
        return member.size <= self._options.persistent_parameters


def current_backward() -> int:
    """A number that is another one in each backward pass, -1 outside of any."""
    return torch._C._current_graph_task_id()
