"""What is computed of each token by itself, in the order in which the tokens lie in memory.

Hidden states are ``[s, b, h]``. On a CPU attention wants the tokens of a sequence one behind the other (see
``ParallelAttention``) and would copy its input in every block, and copy gradients back. So where nothing is split over
a tensor axis, the embedding writes them so, and what comes after keeps it::

    shape     [s, b, h]        strides (h, s h, 1)        memory    [b, s, h]

Sums and activations keep the order of what they are given. Norms and products would not: they turn what is not in one
piece, and are called with ``[b, s, h]`` instead.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["lies_batch_first", "token_by_token"]


def lies_batch_first(x: Tensor) -> bool:
    """Whether ``x`` ``[s, b, h]`` is ``[b, s, h]`` in memory, in one piece."""
    return x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def token_by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, of ``x`` ``[s, b, h]``, in the memory's order, for a function that takes each token by itself.

    ``function`` is given ``[s, b, h]`` or ``[b, s, h]``, and returns ``[s, b, ..]`` or ``[b, s, ..]``.
    """
    return function(x.transpose(0, 1)).transpose(0, 1) if lies_batch_first(x) else function(x)
