"""Momentum before compression: velocities are reduced instead of gradients, and the optimizer has no momentum.

Without compression the order does not matter, as all is linear: the mean of the workers' velocities is the velocity of
the mean gradient. With it, it does. Error feedback holds back some of each gradient, e, and what an optimizer's
momentum m makes of that moves parameters by up to e / (1 - m): ten times as much for 0.9. If the momentum comes first,
e is what is left of a velocity and moves them by e. A velocity is larger than a gradient, but where gradients are
mostly noise only 1 / sqrt(1 - m^2) times, 2.3 for 0.9; and it changes slowly, so that little is left of it for long::

    u <- m u + g        per worker, before compression; plain steps reduce u as well
    parameter <- parameter - lr mean(u)                 torch.optim.SGD(momentum=0)

For sparse gradients this is the momentum correction of Deep Gradient Compression (Lin et al. 2018); 1-bit Adam (Tang et
al. 2021) compresses momenta as well. Measured in ``packages/comm/benchmarks/training.py``; ``docs/slow-networks.md``
has the figures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .residuals import MOMENTUM
from .scheme import Layout

__all__ = ["Velocity"]


class Velocity:
    """This worker's velocities of a buffer.

    A step that is reduced in several goes (of micro-batches, say) sends its velocity with the first, and with the
    others what their gradients add to it::

        first     send m u + g    u <- m u + g
        others    send g          u <- u + g
    """

    def __init__(self, layout: Layout, momentum: float) -> None:
        self.kept = layout.kept(MOMENTUM, layout.segments, layout.length)
        self._momentum = momentum
        self._new = self.kept.current
        self._first = True

    def begin_step(self) -> None:
        """The next gradient is a new step's."""
        self._first = True

    def advance(self, gradient: Tensor) -> Tensor:
        """What to send for ``gradient``: fresh memory, in the layout's dtype.

        In the first go it is the velocity itself: what is written to it before :meth:`keep` stays in it.
        """
        before, new = self.kept.current, self.kept.next()
        if self._first:
            self._new = sent = torch.mul(before, self._momentum, out=new).add_(gradient)
        else:
            self._new = torch.add(before, gradient, out=new)
            sent = gradient.to(new.dtype, copy=True)
        return sent

    def keep(self, reduced: Tensor) -> None:
        """Keeps the last velocity, except where ``reduced``, which came of it, is not finite."""
        fine = torch.isfinite(reduced)
        if (
            fine.device.type != "cpu" or not fine.all()
        ):  # an accelerator is not asked, that would be waiting for it
            torch.where(fine, self._new, self.kept.current, out=self._new)
        self.kept.commit(self._new)
        self._first = False
