"""What a program is made of. Each draws what it needs, alike on all ranks, and does the same on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from .checks import assert_close
from .losses import Loss
from .net import ATTENTION, LAYERS, Interrupted, Net, fails, inputs, matrix_of
from .pair import Graphs, Pair

__all__ = ["LAST", "OPERATIONS", "Operation"]


# -- training ------------------------------------------------------------------------------------------


def train(pair: Pair, random: Random) -> None:
    """Forward, backward, step."""
    pair.backward(pair.losses(Loss.draw(random)))
    step(pair, random)


def train_twice(pair: Pair, random: Random) -> None:
    """Two steps with the same order of uses: the second one's are foreseen."""
    loss = Loss.draw(random)
    for _ in range(2):
        pair.backward(pair.losses(loss))
        step(pair, random)


def forward(pair: Pair, random: Random) -> None:
    """A forward pass whose backward pass comes later, or never."""
    pair.pending.append(pair.losses(Loss.draw(random)))


def backward(pair: Pair, random: Random) -> None:
    """The backward pass of a pending one, in any order."""
    if pair.pending:
        pair.backward(pair.pending.pop(random.randrange(len(pair.pending))))


def backward_again(pair: Pair, random: Random) -> None:
    """One that keeps the graph, which stays pending."""
    if pair.pending:
        pair.backward(random.choice(pair.pending), retain_graph=True)


def drop(pair: Pair, random: Random) -> None:
    """A pending forward pass is forgotten."""
    if pair.pending:
        pair.pending.pop(random.randrange(len(pair.pending)))


def step(pair: Pair, random: Random) -> None:
    """A step with whatever gradients there are; graphs from before it are dropped, as its update writes into them."""
    pair.step()
    pair.pending.clear()


def zero_grad(pair: Pair, random: Random) -> None:
    """Gradients are forgotten, also those under way."""
    pair.zero_grad()


def finish_reduction(pair: Pair, random: Random) -> None:
    """Gradients are reduced before the step; more may follow."""
    pair.sharded.optimizer.finish_reduction()


def not_finite(pair: Pair, random: Random) -> None:
    """One rank's loss is not a number: no rank takes the step. Pending graphs may outlive it."""
    graphs, rank = pair.losses(Loss.draw(random)), random.randrange(pair.axis.size)
    factors = [float("nan") if rank == other else 1.0 for other in range(pair.axis.size)]
    pair.backward(
        Graphs(
            [loss * factors[pair.axis.rank] for loss in graphs.sharded],
            [loss * factor for loss, factor in zip(graphs.plain, factors, strict=True)],
        )
    )
    if random.random() < 0.5:
        pair.sharded.optimizer.finish_reduction()
    pair.step()
    if random.random() < 0.7:
        pair.pending.clear()


# -- accumulation --------------------------------------------------------------------------------------


def accumulate(pair: Pair, random: Random) -> None:
    """One or two micro-batches before others, or before none."""
    loss = Loss.draw(random)
    for _ in range(random.choice([1, 1, 2])):
        with pair.sharded.optimizer.accumulate():
            pair.backward(pair.losses(loss))
    if random.random() < 0.5:
        pair.backward(pair.losses(random.choice([loss, Loss.draw(random)])))


def accumulation_interrupted(pair: Pair, random: Random) -> None:
    """An exception inside :meth:`accumulate`, after a backward pass or in the next forward pass; gradients count."""
    loss, in_forward, order = Loss.draw(random), random.random() < 0.5, Loss.draw(random).order
    try:
        with pair.sharded.optimizer.accumulate():
            pair.backward(pair.losses(loss))
            if in_forward:
                pair.sharded.net(inputs(pair.seed, 0, 0), order, interrupted_at=len(order))
            raise Interrupted
    except Interrupted:
        pass
    if random.random() < 0.6:
        pair.zero_grad()


# -- without training ----------------------------------------------------------------------------------


def evaluate(pair: Pair, random: Random) -> None:
    """A forward pass without gradients."""
    _evaluate(pair, Loss.draw(random), torch.no_grad())


def infer(pair: Pair, random: Random) -> None:
    """A forward pass in inference mode."""
    _evaluate(pair, Loss.draw(random), torch.inference_mode())


def read(pair: Pair, random: Random) -> None:
    """Each parameter is read outside of any module."""
    mine, right = (torch.stack([p.sum() for p in net.parameters()]) for net in pair.nets)
    assert_close("the sums of the parameters", mine.detach(), right.detach())


def _evaluate(pair: Pair, loss: Loss, mode: torch.no_grad | torch.inference_mode) -> None:
    for net in pair.nets:
        net.eval()
    with mode:
        pair.losses(loss)
    for net in pair.nets:
        net.train()


# -- exceptions ----------------------------------------------------------------------------------------


def forward_interrupted(pair: Pair, random: Random) -> None:
    """An exception before some layer, or after the last."""
    _interrupt(pair, Loss.draw(random).order, random, recompute=0)


def recomputed_forward_interrupted(pair: Pair, random: Random) -> None:
    """The same with layers that would be recomputed."""
    _interrupt(pair, Loss.draw(random).order, random, recompute=random.choice([1, 2]))


def _interrupt(pair: Pair, order: tuple[int, ...], random: Random, *, recompute: int) -> None:
    micro, place = pair.next_micro(), random.randint(0, len(order))

    def run(net: Net, rank: int) -> None:
        x = inputs(pair.seed, micro, rank).requires_grad_()
        net(x, order, recompute=[recompute] * len(order), interrupted_at=place)

    pair.fail(run)


def backward_interrupted(pair: Pair, random: Random) -> None:
    """An exception at the beginning or at the end of a backward pass; what is pending may run backward later."""
    micro, order, first = pair.next_micro(), Loss.draw(random).order, random.random() < 0.5

    def run(net: Net, rank: int) -> None:
        x = inputs(pair.seed, micro, rank)
        y = fails(net(x, order)) if first else net(fails(x.requires_grad_()), order)
        y.sum().backward()

    pair.fail_backward(run)
    if random.random() < 0.5:
        pair.pending.clear()


# -- writing to parameters -----------------------------------------------------------------------------


def edit_data(pair: Pair, random: Random) -> None:
    """A weight is written through ``.data``."""
    number = random.randrange(LAYERS)
    for net in pair.nets:
        matrix_of(net.layers[number]).data.mul_(0.9)


@torch.no_grad()
def edit_parameters(pair: Pair, random: Random) -> None:
    """A weight and a parameter of the root are written without gradients."""
    number = random.randrange(LAYERS)
    for net in pair.nets:
        matrix_of(net.layers[number]).mul_(0.9)
        net.scalar.add_(0.01)


def freeze(pair: Pair, random: Random) -> None:
    """Parameters of a layer are not trained from the next step on."""
    _train_or_freeze(pair, random, trained=False)


def unfreeze(pair: Pair, random: Random) -> None:
    """They may be trained again."""
    _train_or_freeze(pair, random, trained=True)


def _train_or_freeze(pair: Pair, random: Random, *, trained: bool) -> None:
    step(pair, random)
    # torch's attention cannot be frozen in part while it is evaluated.
    number, count = random.choice([n for n in range(LAYERS) if n != ATTENTION]), random.choice([1, 2])
    for net in pair.nets:
        for parameter in list(net.layers[number].parameters())[:count]:
            parameter.requires_grad_(trained)


# -- full_parameters() ---------------------------------------------------------------------------------


def full_look(pair: Pair, random: Random) -> None:
    """A forward pass without gradients where parameters are full, contexts inside each other, too."""
    with pair.full_parameters(_part(random)):
        if random.random() < 0.3:
            with pair.full_parameters(2):
                evaluate(pair, random)
        else:
            evaluate(pair, random)


def full_forward(pair: Pair, random: Random) -> None:
    """A forward pass inside whose backward pass comes outside."""
    with pair.full_parameters(_part(random)):
        forward(pair, random)


def full_backward(pair: Pair, random: Random) -> None:
    """The last pending backward pass inside."""
    with pair.full_parameters(_part(random)):
        if pair.pending:
            pair.backward(pair.pending.pop())


def full_edit(pair: Pair, random: Random) -> None:
    """A layer is written, in place and by ``load_state_dict``."""
    number = random.randrange(LAYERS)
    with pair.full_parameters(random.choice([None, number])):
        for net in pair.nets:
            layer = net.layers[number]
            with torch.no_grad():
                matrix_of(layer).mul_(0.9)
                layer.load_state_dict({name: value * 1.01 for name, value in layer.state_dict().items()})


def _part(random: Random) -> int | None:
    return None if random.random() < 0.5 else random.randrange(LAYERS)


# -- gradients that are asked for ----------------------------------------------------------------------


def gradient_penalty(pair: Pair, random: Random) -> None:
    """Gradients of gradients: the squared norm of the first ones is part of the loss."""
    loss = Loss.draw(random)
    if loss.recompute:
        return  # torch refuses autograd.grad with reentry
    pair.record_gradients()
    graphs = pair.losses(loss)
    pair.backward(
        Graphs(
            [value + _penalty(value, pair.sharded.net) for value in graphs.sharded],
            [value + _penalty(value, pair.plain.net) for value in graphs.plain],
        )
    )


def _penalty(loss: Tensor, net: Net) -> Tensor:
    trained = [parameter for parameter in net.layers.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    total = torch.zeros((), dtype=loss.dtype)
    for gradient in gradients:
        if gradient is not None:
            total = total + gradient.square().sum() * 0.1
    return total


def some_gradients(pair: Pair, random: Random) -> None:
    """``torch.autograd.grad`` for two parameters; nothing is accumulated."""
    loss = Loss.draw(random)
    if loss.recompute:
        return
    graphs = pair.losses(loss)
    mine = _gradients(graphs.sharded[0], pair.sharded.net)
    right = _gradients(graphs.plain[pair.axis.rank], pair.plain.net)
    for one, other in zip(mine, right, strict=True):
        assert_close("what torch.autograd.grad gives", one, other)


def _gradients(loss: Tensor, net: Net) -> list[Tensor]:
    wanted = [p for p in (net.scalar, matrix_of(net.layers[1])) if p.requires_grad]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))


# -- optimizers ----------------------------------------------------------------------------------------


def rebuild(pair: Pair, random: Random) -> None:
    """New optimizers for the nets as they are."""
    pair.start_anew()


def reload(pair: Pair, random: Random) -> None:
    """The optimizer's own state is saved and loaded."""
    if not pair.pending:
        pair.sharded.optimizer.load_local_state(pair.sharded.optimizer.local_state())


@dataclass(frozen=True)
class Operation:
    """One of them."""

    run: Callable[[Pair, Random], None]
    often: int
    """How often it is drawn, relative to others."""
    changes: bool = False
    """Whether parameters may be others afterwards, and are compared now and then."""

    @property
    def name(self) -> str:
        """Its function's."""
        return self.run.__name__


OPERATIONS = (
    Operation(train, 6, changes=True),
    Operation(forward, 4),
    Operation(backward, 5),
    Operation(backward_again, 1),
    Operation(drop, 1),
    Operation(step, 3, changes=True),
    Operation(zero_grad, 1),
    Operation(finish_reduction, 2),
    Operation(not_finite, 1),
    Operation(accumulate, 2),
    Operation(accumulation_interrupted, 1),
    Operation(evaluate, 2),
    Operation(infer, 1),
    Operation(read, 1),
    Operation(forward_interrupted, 1),
    Operation(recomputed_forward_interrupted, 1),
    Operation(backward_interrupted, 1),
    Operation(edit_data, 1, changes=True),
    Operation(edit_parameters, 1, changes=True),
    Operation(freeze, 1),
    Operation(unfreeze, 1),
    Operation(full_look, 2),
    Operation(full_forward, 1),
    Operation(full_backward, 1),
    Operation(full_edit, 1, changes=True),
    Operation(gradient_penalty, 1),
    Operation(some_gradients, 1),
    Operation(rebuild, 1, changes=True),
    Operation(reload, 1, changes=True),
)
"""All of them, with how often they are drawn."""

LAST = (Operation(step, 1), Operation(train_twice, 1, changes=True))
"""What every program ends with."""
