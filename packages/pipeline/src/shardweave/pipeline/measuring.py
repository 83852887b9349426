"""What the pieces of a model cost, measured in one process.

Counting operations misses what a device is bad at: a small head with a huge softmax, an embedding that only moves
memory. One micro-batch through the pieces, one after the other, tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .costs import PieceCosts
from .cutting import Model, StageModule, cut, pieces_of

__all__ = ["measure_pieces"]


def measure_pieces(
    model: Model,
    *values: Tensor,
    keywords: Mapping[str, Any] | None = None,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[PieceCosts]:
    """Seconds and bytes of every piece of ``model`` for one micro-batch, in the order of :func:`pieces_of`.

    ``partition([its.forward + its.input + its.weight for its in costs], stages)`` balances what was measured,
    ``Costs.counted(costs, ranges)`` simulates it. Loss functions are no piece: give the last one the head's time, or
    make the loss a part of the head.

    Each piece runs forward and backward ``repeats`` times after one that does not count; the median is taken. The
    gradient of its input alone and that of everything are timed; the weights take the difference. Bytes are those of
    the tensors that autograd keeps, without parameters and buffers. Gradients, random streams and buffers of the
    model are as before afterwards.

    Args:
        model: as :func:`cut` takes it; with its real sizes, on the device where it is to run.
        values: a micro-batch as the first stage gets it.
        keywords: arguments of the step for it.
        repeats: how often each piece is timed, 1 or more.
        clock: gives the time in seconds.

    Raises:
        ValueError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"measure_pieces: repeats is {repeats}; it takes 1 or more")
    stages = cut(model, [range(index, index + 1) for index in range(len(pieces_of(model)))])
    timer = _Timer(clock, values[0].device if values else torch.device("cpu"))
    costs = []
    its: Any = values
    with _kept_state(stages), timer.generators():
        for index, stage in enumerate(stages):
            inputs = tuple(
                _leaf(x, needs_gradient=index > 0) for x in (its if isinstance(its, tuple) else (its,))
            )
            runs = [_run(stage, inputs, keywords or {}, timer) for _ in range(repeats + 1)]
            costs.append(_costs(runs[1:]))
            its = runs[-1].output
    return costs


@dataclass(frozen=True)
class _Timer:
    clock: Callable[[], float]
    device: torch.device

    def now(self) -> float:
        """The time when all that was started is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.clock()

    def generators(self) -> Any:
        """A context after which torch's random numbers go on as before."""
        devices = [] if self.device.type == "cpu" else [self.device]
        return torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda")


@dataclass(frozen=True)
class _Measured:
    output: Any
    forward: float
    input: float
    whole: float
    memory: int


def _run(
    stage: StageModule, inputs: tuple[Any, ...], keywords: Mapping[str, Any], timer: _Timer
) -> _Measured:
    """One forward and two backwards of a piece."""
    kept: dict[int, int] = {}
    held = {its.untyped_storage().data_ptr() for its in [*stage.parameters(), *stage.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    start = timer.now()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(*inputs, **keywords)
    forward = timer.now() - start
    outputs = [its for its in (output if isinstance(output, tuple) else (output,)) if its.requires_grad]
    leaves = [its for its in inputs if isinstance(its, Tensor) and its.requires_grad]
    weights: list[Tensor] = [its for its in stage.parameters() if its.requires_grad]
    alone = _backward(outputs, leaves, timer)
    whole = _backward(outputs, leaves + weights, timer)
    return _Measured(output, forward, alone, whole, sum(kept.values()))


def _backward(outputs: list[Tensor], of: list[Tensor], timer: _Timer) -> float:
    """How long the gradients of ``of`` take; the graph stays."""
    if not outputs or not of:
        return 0.0
    gradients = [torch.ones_like(its) for its in outputs]
    start = timer.now()
    torch.autograd.grad(outputs, of, gradients, retain_graph=True, allow_unused=True)
    return timer.now() - start


def _costs(runs: list[_Measured]) -> PieceCosts:
    whole = median(run.whole for run in runs)
    alone = min(median(run.input for run in runs), whole)
    return PieceCosts(
        forward=median(run.forward for run in runs),
        input=alone,
        weight=whole - alone,
        memory=float(max(run.memory for run in runs)),
    )


def _leaf(value: Any, *, needs_gradient: bool) -> Any:
    """What a piece gets, cut off from the one before."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(needs_gradient and (value.is_floating_point() or value.is_complex()))


@contextmanager
def _kept_state(stages: list[StageModule]) -> Iterator[None]:
    """Afterwards buffers, such as running means, hold what they held before."""
    buffers = {id(its): its for stage in stages for its in nn.Module.buffers(stage)}
    before = {key: its.clone() for key, its in buffers.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for key, its in buffers.items():
                its.copy_(before[key])
