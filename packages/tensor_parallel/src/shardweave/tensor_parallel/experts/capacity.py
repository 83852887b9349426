"""How many tokens of a sequence an expert takes, where it does not take all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shardweave.comm import Axis, all_gather

__all__ = ["capacity_of", "within_capacity"]


def capacity_of(factor: float, length: int, experts: int, k: int) -> int:
    """Tokens of a sequence of ``length`` that each expert takes: ``factor`` times an even share, rounded up.

    >>> capacity_of(1.25, 10, 4, 2)
    7
    """
    return -(-round(factor * 1e6) * length * k // (experts * 1_000_000))


def within_capacity(experts: Tensor, capacity: int, num_experts: int, cut: Axis | None = None) -> Tensor:
    """[s, b, k], bool: which choices are among the first ``capacity`` of their expert in their sequence.

    ``experts``: [s, b, k], the choices; earlier tokens come first, and a token's more probable choice. By sequence, so
    that what is left out depends neither on the micro-batch nor on other ranks' tokens (Lepikhin et al., "GShard",
    section 2.2, where it is by group). ``cut``: the axis whose ranks hold consecutive parts of the sequences;
    collective over it, 8 bytes for each sequence and expert.
    """
    s, b, k = experts.shape
    queues = experts.transpose(0, 1).reshape(b, s * k)
    chosen = F.one_hot(queues, num_experts)
    place = chosen.cumsum(1) - chosen  # how many before it in its queue
    if cut is not None and cut.size > 1:
        everywhere = all_gather(chosen.sum(1)[None], cut)
        place = place + everywhere[: cut.rank].sum(0)[:, None]
    inside = (place * chosen).sum(-1) < capacity
    return inside.view(b, s, k).transpose(0, 1)
