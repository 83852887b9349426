"""Stages that sleep where they would compute, so that a few cores host many ranks; steps that start at one time.

A stage sleeps in its forward, in the gradient of its input and in that of its weight, two nodes of the graph::

    x ────── Input ──┬── times ── y    Input    sleeps in forward and in backward
    weight ─ Weight ─┘                 Weight   sleeps in backward, or puts that into comm's queue if there is one

So a schedule with the backward in halves runs both apart, in ours by the queue and in torch's by the graph. What
is computed, ``x * weight``, takes microseconds.

[Note: What counts as work]
    A sleep takes longer than was asked for: by the kernel's timer, and by what else the cores are at when it ends. That
    is taken out of the idle time, as the stage would have worked, and shown beside it, as it makes a step longer. All
    processes of a machine have one monotonic clock: a step starts at one moment on all ranks and ends when the last of
    them has returned.

[Note: Cold caches]
    Who slept for 20 ms finds the caches cold here: a forward and backward of a small module take 1.8 ms instead of
    0.04, and after 100 ms 8.7 ms, as the neighbours of a virtual machine fill them meanwhile. A stage that computes is
    awake. So a sleeper gets up before its time is over, does a little of what any module does, and again between naps
    until it is: the sleep is as long as it was, and what comes behind it is nearly as fast as behind work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, gradient_work

__all__ = ["Sleeper", "Sleeps", "Stretch", "rehearsal", "started_together"]

EARLY, NAP = 10e-3, 0.5e-3
"""Seconds before its end at which a sleep is over, and of the naps from there on. See [Note: Cold caches]."""


@dataclass
class Sleeps:
    """Of a rank: how long each is, of a forward, an input's gradient and a weight's, and what came of it."""

    seconds: float
    taken: float = 0.0
    """In all, since :meth:`begin`."""
    asked: float = 0.0
    rehearse: Callable[[], object] = lambda: None
    """What a stage is to be warm for."""

    def begin(self) -> None:
        """From now on."""
        self.taken = self.asked = 0.0

    def sleep(self) -> None:
        """Sleeps once."""
        began = time.monotonic()
        end = began + self.seconds
        time.sleep(max(0.0, self.seconds - EARLY))
        while time.monotonic() < end:  # See [Note: Cold caches]
            self.rehearse()
            time.sleep(max(0.0, min(NAP, end - time.monotonic())))
        self.taken += time.monotonic() - began
        self.asked += self.seconds


class Sleeper(nn.Module):
    """``x * weight``, where ``weight`` is one number. ``x`` requires a gradient on every stage, the first too."""

    def __init__(self, sleeps: Sleeps, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))
        self.sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        through = cast(Tensor, _Input.apply(x, self.sleeps))  # type: ignore[no-untyped-call]
        weight = cast(Tensor, _Weight.apply(self.weight, self.weight, self.sleeps))  # type: ignore[no-untyped-call]
        return through * weight


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeps: Sleeps) -> Tensor:
        ctx.sleeps = sleeps
        sleeps.sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.sleeps.sleep()
        return gradient, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, parameter: nn.Parameter, sleeps: Sleeps) -> Tensor:
        ctx.parameter, ctx.sleeps = parameter, sleeps
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        parameter, sleeps = ctx.parameter, ctx.sleeps
        queue = gradient_work(parameter).queue
        if queue is None:
            sleeps.sleep()
            return gradient, None, None

        def later() -> None:
            sleeps.sleep()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        queue.put((parameter,), later)
        return None, None, None


@dataclass(frozen=True)
class Stretch:
    """One step on one rank, in seconds."""

    whole: float
    """From the start that all ranks share to this rank's return."""
    asked: float = field(default=0.0)
    """What it was to sleep."""
    slept: float = field(default=0.0)
    """What it slept. See [Note: What counts as work]."""


def started_together(step: Callable[[], object], sleeps: Sleeps, mesh: Mesh, axis: Axis) -> Stretch:
    """Runs ``step`` on all ranks from one moment on."""
    start = comm.broadcast(torch.tensor(time.monotonic() + 0.03, dtype=torch.float64), axis, 0)
    comm.barrier(mesh.world)
    sleeps.begin()
    time.sleep(max(0.0, float(start) - time.monotonic()))
    step()
    return Stretch(time.monotonic() - float(start), sleeps.asked, sleeps.taken)


def rehearsal() -> Callable[[], object]:
    """A forward and a backward of a stage that does not sleep, by torch alone."""
    stage, x = Sleeper(Sleeps(0.0), 1.0), torch.ones(4, 4, requires_grad=True)

    def rehearse() -> None:
        with torch.enable_grad():
            stage(x).sum().backward()

    return rehearse
