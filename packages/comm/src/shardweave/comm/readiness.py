"""When a gradient is final, and weight gradients that are put off.

Autograd knows when it has added something to ``.grad``; it does not know whether more is to come: from the
next micro-batch, or from a weight-gradient product that a zero-bubble schedule computes later. So neither
autograd's hook nor "the last backward" is the place to start reducing. The last piece of work on a gradient
says so through this module, and who reduces (``zero``) listens. Pipeline, layers and optimizer meet here
without knowing of each other::

    pipeline    hold() before the first micro-batch, release() before the last one's backward
                promise() before the first one, if it will put weight gradients off, retract() behind the last
    layer       defer() when it puts a weight gradient off, complete() when it has added it to .grad,
                withdraw() when the step failed and it never will
    autograd    arrived() after each accumulation into .grad
    zero        subscribe(listener)

    final  =  something arrived or was completed, while nothing is held and nothing is deferred
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientWork", "Subscription", "WeightGradients", "gradient_work"]

_ATTRIBUTE = "_shardweave_gradient_work"

Listener = Callable[[Tensor], None]


class Subscription:
    """Ends a subscription with :meth:`remove`."""

    def __init__(self, listeners: list[tuple[Listener, bool]], entry: tuple[Listener, bool]) -> None:
        self._listeners, self._entry = listeners, entry

    def remove(self) -> None:
        """The listener is not called any more. May be called twice."""
        if self._entry in self._listeners:
            self._listeners.remove(self._entry)


class GradientWork:
    """The work that is still owed to one parameter's gradient. Get it with :func:`gradient_work`."""

    def __init__(self) -> None:
        self.queue: WeightGradients | None = None
        """Where layers put this parameter's weight-gradient work; ``None``: they do it at once. To be there in forward
        already, or promised."""
        self._held = 0
        self._promised = 0
        self._deferred = 0
        self._listeners: list[tuple[Listener, bool]] = []
        self._hook: Any = None

    @property
    def final(self) -> bool:
        """Whether a gradient that arrived by now would be final."""
        return not self._held and not self._deferred

    @property
    def deferred(self) -> bool:
        """Whether a summand of the gradient is still to be computed."""
        return self._deferred > 0

    @property
    def deferrable(self) -> bool:
        """Whether backward may find a queue, for what is computed now.

        Where it will not, a layer need not take its backward apart: autograd's own is the quicker one.
        """
        return self._promised > 0 or self.queue is not None

    def promise(self) -> None:
        """Backward will find a queue, though there is none in forward. Counted; each needs a :meth:`retract`."""
        self._promised += 1

    def retract(self) -> None:
        """Takes one :meth:`promise` back, behind the backward passes that it was made for."""
        if not self._promised:
            raise RuntimeError("retract() without promise()")
        self._promised -= 1

    def hold(self) -> None:
        """More micro-batches follow: what arrives is not final. Counted; each needs a :meth:`release`."""
        self._held += 1

    def release(self) -> None:
        """Takes one :meth:`hold` back. It does not make what already arrived final."""
        if not self._held:
            raise RuntimeError("release() without hold()")
        self._held -= 1

    def defer(self) -> None:
        """A summand of the gradient is computed later. Counted; each needs a :meth:`complete`."""
        self._deferred += 1

    def complete(self, parameter: Tensor) -> None:
        """A deferred summand has been added to ``parameter.grad``."""
        if not self._deferred:
            raise RuntimeError("complete() without defer()")
        self._deferred -= 1
        self.arrived(parameter)

    def withdraw(self) -> None:
        """Takes one :meth:`defer` back: that summand is not going to be computed. Nobody is told."""
        if not self._deferred:
            raise RuntimeError("withdraw() without defer()")
        self._deferred -= 1

    def arrived(self, parameter: Tensor) -> None:
        """Something was added to ``parameter.grad``: tells the listeners."""
        final = self.final
        for listener, every in tuple(self._listeners):
            if final or every:
                listener(parameter)

    def has_other_hooks(self, parameter: Tensor) -> bool:
        """Whether somebody else waits for autograd's accumulation into ``parameter.grad``.

        Autograd does not run such hooks for a summand that is put off: who could put it off had better not.
        """
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        return bool(hooks) and len(hooks) > (self._hook is not None)

    def subscribe(self, parameter: Tensor, listener: Listener, every: bool = False) -> Subscription:
        """``listener(parameter)`` is called when the gradient is final, or with ``every`` at each arrival.

        ``parameter`` has to be a leaf that requires a gradient.
        """
        entry = (listener, every)
        self._listeners.append(entry)
        if self._hook is None:
            self._hook = parameter.register_post_accumulate_grad_hook(self.arrived)
        return Subscription(self._listeners, entry)


def gradient_work(parameter: Tensor) -> GradientWork:
    """The parameter's :class:`GradientWork`, made at the first call."""
    found: Any = getattr(parameter, _ATTRIBUTE, None)
    if isinstance(found, GradientWork):
        return found
    work = GradientWork()
    setattr(parameter, _ATTRIBUTE, work)
    return work


class WeightGradients:
    """A queue of weight-gradient work, to be run when the schedule has room for it.

    A pipeline attaches one to the parameters of a stage (``gradient_work(p).queue = queue``). Layers that
    support it split their backward: the input gradient at once, the rest through :meth:`put`.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[tuple[Tensor, ...], Callable[[], None]]] = deque()

    def put(self, parameters: Sequence[Tensor], compute: Callable[[], None]) -> None:
        """``compute`` will add to the ``.grad`` of ``parameters``; it runs in :meth:`run`, in this order."""
        for parameter in parameters:
            gradient_work(parameter).defer()
        self._pieces.append((tuple(parameters), compute))

    def run(self, pieces: int | None = None) -> None:
        """Runs the oldest ``pieces`` (``None``: all that are there) and tells the parameters' listeners.

        When a piece raises, it is withdrawn and those behind it stay.
        """
        for _ in range(len(self._pieces) if pieces is None else min(pieces, len(self._pieces))):
            parameters, compute = self._pieces.popleft()
            try:
                with torch.no_grad():  # as in autograd's own accumulation
                    compute()
            except BaseException:
                _withdraw(parameters)
                raise
            for parameter in parameters:
                gradient_work(parameter).complete(parameter)

    def drop(self) -> None:
        """Forgets what is there: its step failed. Otherwise no gradient of these parameters would be final again."""
        while self._pieces:
            parameters, _ = self._pieces.popleft()
            _withdraw(parameters)

    def __len__(self) -> int:
        return len(self._pieces)


def _withdraw(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        gradient_work(parameter).withdraw()
