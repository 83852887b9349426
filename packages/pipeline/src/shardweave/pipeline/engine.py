"""Autograd's engine without what ``torch.autograd.backward`` does in Python in front of it.

A pipeline's backward starts from places in the graph, not from tensors. For these torch compares the shape of every
gradient in Python, which takes a quarter of a small backward; the engine itself compares them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

__all__ = ["backward", "gradients_of"]


def backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    inputs: Sequence[Tensor | GradientEdge] = (),
) -> None:
    """As ``torch.autograd.backward``: adds to the ``.grad`` of all leaves behind ``outputs``, or of ``inputs`` only.

    Raises:
        RuntimeError: a gradient has not the shape of its output.
    """
    _engine_run_backward(
        tuple(outputs),
        tuple(gradients),
        retain_graph,
        False,  # no graph of the backward
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradients_of(inputs: Sequence[Tensor], output: GradientEdge, gradient: Tensor) -> Sequence[Tensor | None]:
    """As ``torch.autograd.grad`` of one output: the gradient of each input, ``None`` where it has none."""
    return _engine_run_backward(
        (output,), (gradient,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
