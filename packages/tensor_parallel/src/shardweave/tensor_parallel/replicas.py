"""Parameters that are not split: whose gradients are partial sums, and whether the copies still agree.

The layers of this package record their own parameters. A LayerNorm of the user's is an ordinary module: only
the user knows that it sits where each rank sees a part of the tokens only. :func:`mark_partial` says so;
forgetting it lets the copies drift apart without an error, which is what :func:`check_replicas` finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, all_reduce, broadcast, set_sharding, sharding_of

__all__ = ["check_replicas", "mark_partial"]


def mark_partial(parameters: nn.Module | Iterable[nn.Parameter], axis: Axis) -> None:
    """Records that each rank of ``axis`` computes only a part of these parameters' gradients.

    For what is used on sequence shards (norms, biases, learned positions under sequence parallelism) or
    behind a split (a norm of query heads). Whoever steps, ``ZeroOptimizer`` or
    :func:`shardweave.comm.sum_partial_gradients`, then sums them. Marking twice is the same as once; on an
    axis of one rank nothing is marked. A copy made by ``copy.deepcopy`` has to be marked again.

    Raises:
        ValueError: for a parameter that is split over ``axis``: its ranks' gradients belong to different
            elements.
    """
    if axis.size == 1:
        return
    for parameter in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        record = sharding_of(parameter)
        if any(split.axis == axis for split in record.splits):
            raise ValueError(
                f"parameter {record.name!r} of shape {record.shape} is split over axis {axis.name!r}; "
                "only parameters that every rank holds whole have partial gradients there"
            )
        if axis not in record.partial:
            set_sharding(parameter, replace(record, partial=(*record.partial, axis)))


@torch.no_grad()
def check_replicas(module: nn.Module, axis: Axis) -> None:
    """Checks that all ranks of ``axis`` hold the same bits of every parameter that is not split over it.

    Ranks that share a slice (copies of one key/value head) are compared among each other. Every rank calls
    it; a check for debugging and tests: it moves each such parameter once.

    Raises:
        RuntimeError: on all ranks of the axis, naming the parameters that differ.
    """
    names, differs = [], []
    for name, parameter, replicas in _replicated(module, axis):
        reference = broadcast(parameter.detach().clone(), replicas)
        names.append(name)
        differs.append(not torch.equal(_bits(reference), _bits(parameter.detach())))
    if not names:
        return
    found = all_reduce(torch.tensor(differs, dtype=torch.int32, device=parameter.device), axis, "max")
    wrong = [name for name, flag in zip(names, found.tolist(), strict=True) if flag]
    if wrong:
        raise RuntimeError(
            f"copies on the {axis.size} ranks of axis {axis.name!r} differ: {', '.join(wrong)}; a gradient "
            "that is partial there was not marked (mark_partial) or not summed before the step, or the ranks "
            "started from different values"
        )


def _replicated(module: nn.Module, axis: Axis) -> Iterator[tuple[str, Tensor, Axis]]:
    """Name, parameter and the ranks that hold the same values, where these are several."""
    for name, parameter in module.named_parameters():
        record = sharding_of(parameter)
        if not any(split.axis == axis for split in record.splits):
            replicas = axis
        else:
            shared = [part for part in record.partial if part != axis and set(part.ranks) < set(axis.ranks)]
            if not shared:
                continue
            replicas = shared[0]
        if replicas.size > 1 and axis not in record.exclusive:
            yield name, parameter, replicas


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes: two NaN of the same bits are equal, 0.0 and -0.0 are not."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
