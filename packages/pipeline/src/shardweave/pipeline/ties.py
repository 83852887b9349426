"""Parameters that several pipeline ranks share, such as an embedding that is also the output projection.

Each rank holds a copy and its gradient is one summand of the true one. If all of that is in the sharding
record, whoever sums gradients, takes norms or writes checkpoints treats the copies as the one parameter they
are, and they stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, set_sharding, sharding_of

__all__ = ["tie"]


def tie(
    parameter: nn.Parameter | nn.Module | Iterable[nn.Parameter],
    axis: Axis,
    stages: Sequence[int],
    *,
    rank_of_stage: Sequence[int] | None = None,
) -> None:
    """Marks this rank's copy of parameters that the ranks of several stages share, and makes copies equal.

    Every rank that holds a copy calls it, for the same parameters in the same order; a rank that does not
    must not have a parameter to tie. Where there are several ties, :func:`tie_all` makes them in one order. The
    copies take the values of the rank of the lowest stage (on the meta device there are none to take). A whole
    module can be tied, with every parameter in it: a norm behind a shared embedding is as much a part of the tie
    as the embedding.

    The record then says: ``tied`` and ``partial`` over the ranks that share it, ``exclusive`` on ``axis``.
    Gradients are complete after ``comm.sum_partial_gradients`` (``ZeroOptimizer`` does it by itself).

    Several parameters tied over the same ranks are told apart by their canonical names. Give them the same
    names on all these ranks, with ``comm.name_parameters`` or in the call of ``ZeroOptimizer``, before an
    optimizer is built. Without names ``ZeroOptimizer`` goes by the places among its parameters, which differ
    between stages: it may pair copies of equal shape wrongly, and cannot see that it does. (tie() gives no
    names of its own: those of two calls would have to differ, the same way in every run.)

    With all sharing stages on one rank there is one parameter and nothing to mark.

    Args:
        parameter: a parameter, a module, or several parameters.
        axis: the pipeline axis.
        stages: those that share it.
        rank_of_stage: that of the schedule, when ranks hold several stages; ``None``: stage r is on rank r.

    Raises:
        ValueError: a stage that is not there, a rank that holds none of them, or copies of different shapes.
    """
    ranks = ranks_of(axis, stages, rank_of_stage)
    parameters = parameters_of(parameter)
    shared = axis.subset(ranks)
    if shared is None:
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name!r} holds none of the stages {list(stages)}, which are on "
            f"ranks {ranks}; tie() is called where a copy is"
        )
    if shared.size > 1:
        _check_alike(parameters, shared)
    mark(parameters, axis, shared)


def mark(parameters: Iterable[Tensor], axis: Axis, shared: Axis) -> None:
    """Records that the ranks of ``shared``, of ``axis``, hold copies, and gives them the first one's values.

    All members of ``shared`` call it with copies of the same shapes in the same order.
    """
    for its in parameters:
        record = sharding_of(its)
        exclusive = record.exclusive if axis in record.exclusive else (*record.exclusive, axis)
        if shared.size > 1:
            partial = record.partial if shared in record.partial else (*record.partial, shared)
            record = replace(record, tied=shared, partial=partial)
            if not its.is_meta:
                comm.broadcast(its.detach(), shared)
        set_sharding(its, replace(record, exclusive=exclusive))


def ranks_of(axis: Axis, stages: Sequence[int], rank_of_stage: Sequence[int] | None) -> list[int]:
    """The ranks of these stages, in the order of the stages: the first holds the original."""
    places = range(axis.size) if rank_of_stage is None else rank_of_stage
    wrong = [stage for stage in stages if not 0 <= stage < len(places)]
    if wrong or not stages:
        raise ValueError(
            f"tie over the stages {list(stages)} of {len(places)}: name stages from 0 to {len(places) - 1}"
            + ("" if rank_of_stage is not None else "; with several stages per rank pass rank_of_stage")
        )
    return list(dict.fromkeys(places[stage] for stage in sorted(stages)))


def parameters_of(parameter: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> list[Tensor]:
    """What is tied, one by one."""
    if isinstance(parameter, nn.Module):
        return list(parameter.parameters())
    return [parameter] if isinstance(parameter, Tensor) else list(parameter)


def _check_alike(parameters: Sequence[Tensor], shared: Axis) -> None:
    """Raises ValueError on all members unless they tie parameters of the same shapes in the same order."""
    # A number per parameter would do, but sizes that differ end a gloo process without a word: first the
    # count, then the shapes padded to the largest number of dims.
    device = torch.device("cpu") if not parameters or parameters[0].is_meta else parameters[0].device
    dims = max((its.dim() for its in parameters), default=0) or 1
    counts = comm.all_gather(torch.tensor([[len(parameters), dims]], device=device), shared).tolist()
    if any(count != counts[0] for count in counts):
        shapes = [tuple(its.shape) for its in parameters]
        raise ValueError(
            f"tie: rank {shared.rank} of {shared.size} ties {shapes} and others do not; (number of parameters, "
            f"most dims) by rank: {counts}"
        )
    padded = [list(its.shape) + [-1] * (dims - its.dim()) for its in parameters]
    mine = torch.tensor([padded], dtype=torch.int64, device=device)
    everyone = comm.all_gather(mine, shared).tolist()
    for rank, its in enumerate(everyone):
        if its != everyone[0]:
            raise ValueError(
                f"tie: copies differ in shape: {_shapes(everyone[0])} on the first of {shared.size} ranks that "
                f"share them and {_shapes(its)} on the one at position {rank}"
            )


def _shapes(padded: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(size for size in shape if size >= 0) for shape in padded]
