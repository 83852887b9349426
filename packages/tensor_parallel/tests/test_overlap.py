"""When products are computed in pieces: a prediction, and layers that follow it alike on every rank."""

from __future__ import annotations

import pytest
import torch
from packages.tensor_parallel.tests.reference import assert_near, part, values

from shardweave.comm import Axis, Link, Links, Mesh, all_gather
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    FusedColumnLinear,
    Overlap,
    ProductSpeed,
    RowParallelLinear,
    measure_products,
    overlap_for,
)
from shardweave.tensor_parallel.overlap import Sizes, fitted

NVLINK = Links(Link(5e-6, 200e9), Link(10e-6, 25e9))
H100 = ProductSpeed(10e-6, 500e12)


def axis_of(size: int, ranks_per_node: int | None = None) -> Axis:
    """An axis to predict for, on which nobody is."""
    per_node = size if ranks_per_node is None else ranks_per_node
    group = torch.distributed.ProcessGroup(0, size) if size > 1 else None  # type: ignore[call-arg]
    return Axis("tp", tuple(range(size)), 0, group, nodes=tuple(rank // per_node for rank in range(size)))


def of_column(tokens: int, inputs: int, outputs: int, ranks: int) -> Sizes:
    return Sizes("all_gather", 2 * tokens * inputs, 2 * tokens * inputs * outputs // ranks)


def test_worked_by_hand() -> None:
    """4 ranks; a shard takes 1 s, a product 2 s, both without latency: 3 + 8 s, and in pieces 4 times 2 s."""
    overlap = Overlap(Links(Link(0.0, 1.0), Link(0.0, 1.0)), ProductSpeed(0.0, 1.0))
    sizes, axis = Sizes("all_gather", 4, 8), axis_of(4)
    assert (overlap.plain(sizes, axis), overlap.in_pieces(sizes, axis)) == (11.0, 8.0)
    assert overlap.pays(sizes, axis)
    # The wire is the slower one: 3 shards of 5 s, and the last piece.
    sizes = Sizes("reduce_scatter", 20, 8)
    assert (overlap.plain(sizes, axis), overlap.in_pieces(sizes, axis)) == (23.0, 17.0)
    # Nearly nothing to hide: 1 % is not worth it.
    sizes = Sizes("all_gather", 4, 800)
    assert overlap.in_pieces(sizes, axis) < overlap.plain(sizes, axis)
    assert not overlap.pays(sizes, axis)


def test_large_products_pay_and_small_ones_do_not() -> None:
    """A transformer block's widest product on eight GPUs, of a whole and of a sixteenth of a sequence."""
    overlap = Overlap(NVLINK, H100)
    assert overlap.pays(of_column(16384, 8192, 28672, 8), axis_of(8))
    assert not overlap.pays(of_column(128, 1024, 4096, 8), axis_of(8))


def test_latency_of_products_and_messages_counts_once_a_piece() -> None:
    overlap = Overlap(Links(Link(1.0, 1e9), Link(1.0, 1e9)), ProductSpeed(0.25, 1e9))
    assert overlap.in_pieces(Sizes("all_gather", 8, 8), axis_of(4)) == pytest.approx(3 * 1.0 + 0.25, abs=1e-6)


def test_over_nodes_scattered_summands_share_the_network() -> None:
    """Two nodes of four ranks: of a ring one rank of a node sends across, of a scatter all four."""
    overlap = Overlap(Links(Link(0.0, 1e3), Link(0.0, 1.0)), ProductSpeed(0.0, 1e9))
    axis = axis_of(8, ranks_per_node=4)
    gather, scatter = (
        overlap.in_pieces(Sizes(kind, 8, 0), axis) for kind in ("all_gather", "reduce_scatter")
    )
    assert (gather, scatter) == (7.0, 28.0)
    assert overlap.pays(Sizes("all_gather", 8, 10**10), axis)
    assert not overlap.pays(Sizes("reduce_scatter", 8, 10**10), axis)


def test_one_rank_and_no_tokens_have_nothing_to_hide() -> None:
    overlap = Overlap(NVLINK, H100)
    assert not overlap.pays(of_column(16384, 8192, 28672, 1), axis_of(1))
    assert not overlap.pays(of_column(0, 8192, 28672, 8), axis_of(8))


def test_speeds_are_fitted_through_two_products() -> None:
    assert fitted(10, 2.0, 30, 4.0) == ProductSpeed(1.0, 10.0)
    assert fitted(10, 2.0, 30, 1.5) == ProductSpeed(0.0, 20.0)  # noise
    for bad in (
        {"latency": -1.0, "speed": 1.0},
        {"latency": 0.0, "speed": 0.0},
        {"latency": 0.0, "speed": float("inf")},
    ):
        with pytest.raises(ValueError, match=r"a product's latency of|a speed of products of"):
            ProductSpeed(**bad)


@pytest.mark.ranks(2)
def test_all_ranks_measure_the_same_and_a_cpu_computes_at_once() -> None:
    axis = Mesh(tp=2).tp
    found = measure_products(axis, device="cpu", dtype=torch.float32)
    both = all_gather(torch.tensor([[found.latency, found.speed]], dtype=torch.float64), axis)
    assert torch.equal(both[0], both[1])
    assert 1e6 < found.speed < 1e13
    assert overlap_for(axis, NVLINK, device="cpu", dtype=torch.float32) is False


@pytest.mark.ranks(3)
def test_ranks_with_more_features_decide_as_those_with_fewer() -> None:
    """Features 7 on three ranks: the border between both ways lies where only the first rank's numbers would be."""
    mesh = Mesh(tp=3)
    tokens, hidden = 6, 4
    x = part(values(tokens, 1, hidden), mesh.tp, 0)
    for speed, taken in ((1e3, True), (1e9, False)):
        overlap = Overlap(Links(Link(0.0, 1e3), Link(0.0, 1e3)), ProductSpeed(0.0, speed))
        torch.manual_seed(1)
        up = ColumnParallelLinear(hidden, 7, mesh.tp, sequence_dim=0, decomposed=overlap, dtype=torch.float64)
        down = RowParallelLinear(7, hidden, mesh.tp, sequence_dim=0, decomposed=overlap, dtype=torch.float64)
        pair = FusedColumnLinear(
            hidden, {"a": 7, "b": 2}, mesh.tp, sequence_dim=0, decomposed=overlap, dtype=torch.float64
        )
        for layer in (up, pair):
            layer(x)  # lengths are compared at the first call
        mesh.ledger.reset()
        y = down(up(x))
        pair(x)
        used = {kind for kind, total in mesh.ledger.by("kind").items() if total.calls}
        assert used == ({"send", "receive"} if taken else {"all_gather", "reduce_scatter"})
        up.decomposed = down.decomposed = False
        assert_near(y, down(up(x)))
