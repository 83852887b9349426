"""Several ties at once, declared alike on all ranks.

A tie concerns a few ranks. With two of them, a rank that begins with one and a rank that begins with the other wait
for each other for ever, and nothing in either's code looks wrong. So all ranks say first what they are going to tie,
also those that have no part in it; then all go through the ties in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, set_sharding, sharding_of

from .ties import mark, parameters_of, ranks_of

__all__ = ["tie_all"]

Copy: TypeAlias = nn.Parameter | nn.Module | Iterable[nn.Parameter] | None
Mine: TypeAlias = dict[str, list[Tensor] | None]


def tie_all(
    groups: Mapping[str, Mapping[int, Copy]], axis: Axis, *, rank_of_stage: Sequence[int] | None = None
) -> None:
    """Ties every group of parameters as :func:`tie` does one; collective over ``axis``.

    Every rank of ``axis`` calls it and names all groups, with all their stages, in any order. Under a stage of its
    own it gives that stage's parameter, or module, or several parameters; under the others' ``None``. A model whose
    embedding is also the head, and whose first and third stage share a norm, on stages 0 to 2::

        rank 0   {"embedding": {0: first.embedding, 2: None}, "norm": {0: first.norm, 2: None}}
        rank 1   {"embedding": {0: None, 2: None}, "norm": {0: None, 2: None}}
        rank 2   {"norm": {0: None, 2: last.norm}, "embedding": {0: None, 2: last.head}}

    A rank that holds two stages of a group, as the first rank of a V does of embedding and head, has one parameter in
    both places: the same object. Its gradient has both stages' summands, and it is counted once.

    The ties are made in the order of their stages, then of their names. A parameter without a canonical name is
    given its group's, so that ``ZeroOptimizer`` tells several ties on the same ranks apart.
    ``comm.sum_partial_gradients`` has one order of its own for ties on different ranks; those on the same ranks it
    takes in the order in which it is given them, which has to be the same there.

    Args:
        groups: by name, per stage that shares the group, this rank's copy or ``None``.
        axis: the pipeline axis.
        rank_of_stage: that of the schedule, when ranks hold several stages; ``None``: stage r is on rank r.

    Raises:
        ValueError: on all ranks, before anything is changed: a rank names other groups or stages than the first one; a
            copy is missing where its stage is, or given where it is not; copies differ in shape or dtype, or are two
            objects on one rank; a stage that is not there.
    """
    mine, refusal = _mine(groups, axis, rank_of_stage)
    declared = {
        name: {
            "stages": sorted(groups[name]),
            "copy": None if copy is None else [f"{list(its.shape)} {its.dtype}" for its in copy],
        }
        for name, copy in mine.items()
    }
    everyone = comm.gather_values([None if refusal is None else str(refusal), declared], axis)
    if refusal is not None:
        raise refusal
    _check(everyone, axis)
    for name in sorted(groups, key=lambda name: (sorted(groups[name]), name)):
        copy = mine[name]
        shared = axis.subset(ranks_of(axis, list(groups[name]), rank_of_stage))
        if copy is not None and shared is not None:
            mark(copy, axis, shared)
            _name(name, copy)


def _name(group: str, parameters: list[Tensor]) -> None:
    """Names what has no canonical name yet, the same on all ranks."""
    for index, its in enumerate(parameters):
        record = sharding_of(its)
        if not record.name:
            name = group if len(parameters) == 1 else f"{group}.{index}"
            set_sharding(its, replace(record, name=name))


def _mine(
    groups: Mapping[str, Mapping[int, Copy]], axis: Axis, rank_of_stage: Sequence[int] | None
) -> tuple[Mine, ValueError | None]:
    """This rank's parameters of every group, and what is wrong with them."""
    mine: Mine = {}
    for name, copies in groups.items():
        try:
            mine[name] = _copy(name, copies, axis, rank_of_stage)
        except ValueError as error:
            return {}, error
    return mine, None


def _copy(
    name: str, copies: Mapping[int, Copy], axis: Axis, rank_of_stage: Sequence[int] | None
) -> list[Tensor] | None:
    """What this rank holds of a group."""
    ranks_of(axis, list(copies), rank_of_stage)  # refuses stages that are not there
    found: list[Tensor] | None = None
    for stage, copy in sorted(copies.items()):
        rank = stage if rank_of_stage is None else rank_of_stage[stage]
        if (rank == axis.rank) != (copy is not None):
            given = "is given a copy" if copy is not None else "has none"
            raise ValueError(
                f"tie_all: rank {axis.rank} of axis {axis.name!r} {given} of {name!r} for stage {stage}, which is "
                f"on rank {rank}; give a parameter where the stage is, and None elsewhere"
            )
        if copy is None:
            continue
        parameters = parameters_of(copy)
        if found is not None and [id(its) for its in found] != [id(its) for its in parameters]:
            raise ValueError(
                f"tie_all: rank {axis.rank} of axis {axis.name!r} holds {name!r} for two stages and gives two "
                "parameters; let both stages use one object, as in `head.weight = embedding.weight`"
            )
        found = parameters
    return found


def _check(everyone: list[Any], axis: Axis) -> None:
    """Raises ValueError where a rank refuses, or declares something else than the first that says it."""
    for rank, (refusal, _) in enumerate(everyone):
        if refusal is not None:
            raise ValueError(f"rank {rank} of axis {axis.name!r} refused: {refusal}")
    first = {name: group["stages"] for name, group in everyone[0][1].items()}
    for rank, (_, declared) in enumerate(everyone):
        stages = {name: group["stages"] for name, group in declared.items()}
        if stages != first:
            raise ValueError(
                f"tie_all: rank {rank} of axis {axis.name!r} ties {_sorted(stages)} and rank 0 {_sorted(first)}, each "
                "group with its stages; name all groups and all their stages on every rank"
            )
    for name in first:
        copies = [(rank, its[name]["copy"]) for rank, (_, its) in enumerate(everyone)]
        held = [(rank, copy) for rank, copy in copies if copy is not None]
        for rank, copy in held[1:]:
            if copy != held[0][1]:
                raise ValueError(
                    f"tie_all: copies of {name!r} differ in shape or dtype: {held[0][1]} on rank {held[0][0]} of axis "
                    f"{axis.name!r} and {copy} on rank {rank}"
                )


def _sorted(stages: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(stages.items()))
