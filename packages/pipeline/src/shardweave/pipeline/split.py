"""The backward of a stage in two halves, for modules that know nothing of it.

A zero-bubble schedule wants the gradient of a stage's input first, for which the stage before waits, and those of its
weights later. Layers that put their weight gradient into comm's queue offer that. Of any other module torch's graph
says enough: where a parameter enters a matrix product, a convolution or an embedding, and nothing else, its gradient
is one product more, which nobody waits for::

    x ──┬──────────────────> Addmm ──> ... ──> output       Addmm's backward is two products:
        │   weight ── T ─────┘                              that towards x runs in I, that towards weight in W
        └──> ...

    I   backward(output, inputs=[x, other parameters, Addmm])     what arrives at Addmm is kept
    W   grad(Addmm, weight, what was kept)                        one product for each such node

What is not worth it, or cannot be told apart, is computed in I with the rest: norms and other elementwise parameters;
a parameter that is used twice in a stage, or has hooks of others that run after accumulation; what autograd functions
written in Python own (TP layers, which have the queue); what was saved through hooks (torch's checkpoint would run
again for every product). Nothing is put off in a graph with compiled code or torch's reentrant checkpoint, which run in
whole backwards only.

[Note: Hooks of others]
    A node's backward runs twice, once for its input and once for its weight. Hooks on the tensor that it made run
    twice as well; the weight's half is computed from what they returned the first time, so that a hook that changes
    a gradient changes it once. Hooks on a parameter that run after accumulation (other than comm's) would not see a
    gradient that is put off, so it is not; layers that have the queue do not look.

[Note: Memory of a late half]
    A node that waits for W keeps all of the graph below it, and the first half must not free what is saved. So the
    stage's activations stay until W: that is what ``Schedule.simulate`` counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from shardweave.comm import WeightGradients, gradient_work

from .engine import backward, gradients_of

__all__ = ["backward_of_inputs"]

_PRODUCTS = {
    "AddmmBackward0": "_raw_saved_mat1",
    "MmBackward0": "_raw_saved_self",
    "BmmBackward0": "_raw_saved_self",
    "BaddbmmBackward0": "_raw_saved_batch1",
    "ConvolutionBackward0": "_raw_saved_input",
    "EmbeddingBackward0": "_raw_saved_indices",
}
"""Nodes with a half of their own for a weight, and something that each saved, by which to see hooks."""

_VIEWS = frozenset(
    [
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "ExpandBackward0",
        "AliasBackward0",
        "ToCopyBackward0",
    ]
)
"""What may stand between a parameter and its product."""

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_WHOLE = frozenset(["CompiledFunctionBackward", "CheckpointFunctionBackward"])
"""What runs in one whole backward only: compiled code may free in its first one what it saved, and refuses to keep it;
torch's reentrant checkpoint refuses a backward towards chosen inputs."""


class _Late:
    """A product of which the weight's half runs later; a hook in front of its node."""

    def __init__(self, caught: list[_Late]) -> None:
        # No reference to the node: it holds this hook, and nobody would collect the ring.
        self._caught = caught
        self.gradients: tuple[Tensor | None, ...] | None = None

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Keeps what arrives in the first half and gives it to the second. See [Note: Hooks of others]."""
        if self.gradients is None:
            self.gradients = gradients
            self._caught.append(self)
            return None
        return self.gradients


def backward_of_inputs(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    trained: Collection[int],
    queue: WeightGradients,
) -> None:
    """Adds to ``.grad`` of all leaves behind ``outputs``, but puts off what can be put off of a stage's parameters.

    ``trained``: the ``id`` of each of these. What is put off goes into ``queue``, in the order in which autograd came
    by, to be run once; until then the parameters' gradients are not final. Nothing is put off twice: what a layer
    puts into the queue itself stays its own.
    """
    leaves, late = _plan(outputs, trained)
    if not late:
        backward(outputs, gradients)
        return
    caught: list[_Late] = []
    owners = {}
    for node, weights in late.items():
        hook = _Late(caught)
        node.register_prehook(hook)
        owners[hook] = (GradientEdge(node, 0), weights)
    wanted: list[Tensor | GradientEdge] = [*leaves, *(edge for edge, _ in owners.values())]
    try:
        backward(outputs, gradients, retain_graph=True, inputs=wanted)
        arrivals = tuple(caught)
    finally:
        caught.clear()  # the hooks hold it
    for hook in arrivals:
        edge, weights = owners[hook]
        arrived = (hook.gradients or (None,))[0]
        if arrived is not None:
            queue.put(weights, _Second(edge, weights, arrived))


class _Second:
    """The weight's half of one product."""

    def __init__(self, edge: GradientEdge, weights: Sequence[Tensor], arrived: Tensor) -> None:
        self._edge, self._weights, self._arrived = edge, weights, arrived

    def __call__(self) -> None:
        found = gradients_of(self._weights, self._edge, self._arrived)
        for weight, gradient in zip(self._weights, found, strict=True):
            if gradient is not None:
                _accumulate(weight, gradient, self._arrived)


def _accumulate(parameter: Tensor, gradient: Tensor, arrived: Tensor) -> None:
    """As autograd adds to ``.grad``: there is one tensor, of the parameter's layout, that is nobody else's.

    Nothing is recorded, as the queue runs it without autograd.
    """
    if parameter.grad is not None:
        if parameter.grad.is_sparse and not gradient.is_sparse:
            parameter.grad = parameter.grad + gradient
        else:
            parameter.grad.add_(gradient)
    elif gradient.is_sparse or (gradient.stride() == parameter.stride() and not _shares(gradient, arrived)):
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same memory: a bias' gradient may be what arrived, which others keep too."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _plan(
    outputs: Sequence[GradientEdge], trained: Collection[int]
) -> tuple[list[Tensor], dict[Node, list[Tensor]]]:
    """The leaves whose gradients are computed at once, and by node the parameters that can wait."""
    accumulators, users, whole = _walk(outputs)
    leaves: list[Tensor] = []
    late: dict[Node, list[Tensor]] = {}
    for accumulator in accumulators:
        variable = accumulator.variable  # type: ignore[attr-defined]
        at_once = whole or id(variable) not in trained or gradient_work(variable).has_other_hooks(variable)
        product = None if at_once else _product(accumulator, users)
        if product is None:
            leaves.append(variable)
        else:
            late.setdefault(product, []).append(variable)
    return leaves, late


def _walk(outputs: Sequence[GradientEdge]) -> tuple[list[Node], dict[Node, list[Node]], bool]:
    """The graph's nodes that accumulate, who uses each node, and whether only a whole backward is possible."""
    users: dict[Node, list[Node]] = {}
    accumulators = []
    whole = False
    todo = [edge.node for edge in outputs]
    # What an output is itself has a user outside of this graph.
    users.update({node: [node] for node in todo})
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        whole = whole or name in _WHOLE
        if name == _ACCUMULATE:
            accumulators.append(node)
        for below, _ in node.next_functions:
            if below is not None:
                users.setdefault(below, []).append(node)
                todo.append(below)
    return accumulators, users, whole


def _product(accumulator: Node, users: dict[Node, list[Node]]) -> Node | None:
    """The one product that a parameter enters and that has a half for it, if that is all the parameter does."""
    node = accumulator
    while len(users[node]) == 1:
        above = users[node][0]
        if above is node:
            return None
        name = above.name()
        if name in _PRODUCTS:
            saved: Any = getattr(above, _PRODUCTS[name], None)
            return above if saved is None or saved.unpack_hook is None else None
        if name not in _VIEWS:
            return None
        node = above
    return None
