"""Attention over a cut sequence by exchanging heads for tokens, and the core on whole rows.

An all-to-all gives each rank of the context axis some of the heads for all tokens; heads never look at each other, so
what follows is the core as in one process; a second all-to-all goes back (Jacobs et al., arXiv:2309.14509)::

    [b, n, s/N, d]  --all-to-all-->  [b, n/N, s, d]  --core-->  [b, n/N, s, d]  --all-to-all-->  [b, n, s/N, d]

Two exchanges in place of the ring's N - 1 messages, each of 1/N of the tensors; but no more ranks than heads, and the
exchanges hide behind nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardweave.comm import Axis, exchange_between

from .context import check_context, held_order
from .core import Scoring
from .kept import kept_core
from .ring import ring_attention
from .softmax_lse import private_operator

__all__ = ["check_exchange", "exchanged_attention", "local_attention"]


def check_exchange(heads: int, axis: Axis) -> None:
    """Refuses ``heads`` query heads, those of one tensor rank, that the ranks of ``axis`` cannot share."""
    if heads % axis.size:
        raise ValueError(
            f"the all-to-all form gives each of the {axis.size} ranks of context axis {axis.name!r} some of the "
            f"{heads} heads that are here, which do not divide; use a size that divides {heads}, or the ring"
        )


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, axis: Axis) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of ``axis``. All of them call it.

    Arguments, result and errors are those of :func:`~shardweave.tensor_parallel.ring.ring_attention`. Where the
    key/value heads do not divide, each is sent to all ranks whose queries read it.

    Forward: one all-to-all of queries, keys and values together, and one of the result. Backward: the same.

    ValueError: also when the heads do not divide over the axis.
    """
    length, rank = q.shape[2] * axis.size, axis.rank
    check_context(length, axis)
    check_exchange(q.shape[1], axis)
    repeats = math.lcm(k.shape[1], axis.size) // k.shape[1]
    parts = [q, *(tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor for tensor in (k, v))]
    counts = [part.shape[1] // axis.size for part in parts]
    # For each rank its heads of all three, one behind the other: [b, N, n/N + 2 m/N, s/N, d]
    joined = torch.cat([part.unflatten(1, (axis.size, -1)) for part in parts], 2).flatten(1, 2)
    whole = exchange_between(joined, axis, split_dim=1, concat_dim=2)
    held = held_order(length, axis.size, q.device)
    rows = whole.index_select(2, held.argsort())  # in the order of the text
    own_q, own_k, own_v = rows.split(counts, 1)
    mixed = local_attention(own_q, own_k, own_v, scoring.of_heads(rank * counts[0], counts[0]))
    return exchange_between(mixed.index_select(2, held), axis, split_dim=2, concat_dim=1)


def local_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """The core on whole rows: ``q`` ``[b, n, s, d]``, ``k`` and ``v`` ``[b, m, s, d]``, to ``[b, n, s, d]``.

    Through torch's fused attention; with a mask in the form that makes it anew for backward instead of keeping it for
    each layer, where there is one for the device.
    """
    rows = (range(q.shape[2]),)
    masked = scoring.slopes is not None or scoring.documents is not None
    operator = private_operator(q.device.type, q.dtype)
    if scoring.drops or (masked and operator is not None):
        return ring_attention(q, k, v, scoring, Axis.single())
    bias = scoring.block(q, rows, rows, overlap=True)
    with kept_core():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.mask, is_causal=bias.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
