"""B076: every wrapper, on views that are no block of memory, gives what it gives for a copy that is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, Mesh

VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "column": lambda base: base[:, 0],
    "transposed": lambda base: base.t(),
    "every second row": lambda base: base[::2],
    "middle": lambda base: base[1:-1, 1:-1],
}
"""Views of an [8, 6] tensor; each has an even number of rows."""


def base(rank: int) -> Tensor:
    """Different for each rank and element."""
    return torch.arange(48.0).view(8, 6) + 100 * rank


def exchanged(x: Tensor, axis: Axis) -> Tensor:
    """A send to the other rank and a receive from it, into a view like ``x``."""
    wide = (
        torch.zeros(8, 12)[:, ::2] if x.dim() == 1 else torch.zeros(2 * x.shape[0], 2 * x.shape[1])[::2, ::2]
    )
    into = wide[: x.shape[0], 0] if x.dim() == 1 else wide
    peer = 1 - axis.rank
    for pending in comm.exchange([comm.Message.send(x, axis, peer), comm.Message.receive(into, axis, peer)]):
        pending.wait()
    return into


CALLS: Mapping[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_gather": lambda x, axis: comm.all_gather(x, axis),
    "all_gather, last dim": lambda x, axis: comm.all_gather(x, axis, -1),
    "reduce_scatter": lambda x, axis: comm.reduce_scatter(x, axis),
    "reduce_scatter, uneven": lambda x, axis: comm.reduce_scatter(x, axis, sizes=(1, x.shape[0] - 1)),
    "all_to_all": lambda x, axis: comm.all_to_all(x, axis, split_dim=0, concat_dim=-1),
    "send and receive": exchanged,
    "scatter_to": lambda x, axis: comm.scatter_to(x, axis, 0),
    "gather_from": lambda x, axis: comm.gather_from(x, axis, 0),
    "gather_for": lambda x, axis: comm.gather_for(x, axis, 0),
    "reduce_from": lambda x, axis: comm.reduce_from(x, axis),
    "copy_to": lambda x, axis: comm.copy_to(x, axis),
    "reduce_scatter_to": lambda x, axis: comm.reduce_scatter_to(x, axis, 0),
    "exchange_between": lambda x, axis: comm.exchange_between(x, axis, split_dim=0, concat_dim=-1),
}

IN_PLACE: Mapping[str, Callable[[Tensor, Axis], Tensor]] = {
    "sum": lambda x, axis: comm.all_reduce(x, axis),
    "mean, later": lambda x, axis: comm.start_all_reduce(x, axis, "mean").wait(),
    "max": lambda x, axis: comm.all_reduce(x, axis, "max"),
    "broadcast": lambda x, axis: comm.broadcast(x, axis, 1),
}


def both_axes() -> list[Axis]:
    mesh = Mesh(tp=2)
    return [mesh.tp, mesh.tp.blocks(2)]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.ranks(2)
def test_results_are_those_of_a_contiguous_copy_and_the_input_stays(view: str) -> None:
    for axis in both_axes():
        for name, call in CALLS.items():
            memory = base(axis.rank)
            x = VIEWS[view](memory)
            assert not x.is_contiguous()
            assert torch.equal(call(x, axis), call(x.clone(memory_format=torch.contiguous_format), axis)), (
                name
            )
            assert torch.equal(memory, base(axis.rank)), name


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.ranks(2)
def test_what_works_in_place_changes_the_view_and_nothing_beside_it(view: str) -> None:
    for axis in both_axes():
        for name, call in IN_PLACE.items():
            right = call(VIEWS[view](base(axis.rank)).clone(memory_format=torch.contiguous_format), axis)
            memory, expected = base(axis.rank), base(axis.rank)
            VIEWS[view](expected).copy_(right)
            x = VIEWS[view](memory)
            assert call(x, axis) is x, name
            assert torch.equal(memory, expected), name
