"""Parameters that every rank holds whole: partial gradients, and copies that must agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import (
    F64,
    assert_gradients_equal,
    assert_near,
    part,
    values,
    whole,
)
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, Sharding, Split, sharding_of, sum_partial_gradients
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    assert_replicas_equal,
    mark_partial,
)
from shardweave.tensor_parallel.replicas import kinds_of


class Block(nn.Module):
    """Pre-norm transformer block, ``[s, b, h]``."""

    def __init__(self, axis: Axis, *, sequence_dim: int | None, mark: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(6, dtype=F64), nn.LayerNorm(6, dtype=F64)
        self.attention = ParallelAttention(6, 2, axis, sequence_dim=sequence_dim, dtype=F64)
        self.up = ColumnParallelLinear(6, 10, axis, sequence_dim=sequence_dim, dtype=F64)
        self.down = RowParallelLinear(10, 6, axis, sequence_dim=sequence_dim, dtype=F64)
        if mark and sequence_dim is not None:
            mark_partial(self.norm1, axis)
            mark_partial(self.norm2, axis)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


def blocks(axis: Axis, *, sequence_dim: int | None, mark: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(axis, sequence_dim=sequence_dim, mark=mark) for _ in range(2)))


def backward(module: nn.Module, axis: Axis, sequence_dim: int | None) -> Tensor:
    module.zero_grad()
    x, weights = values(8, 3, 6), values(8, 3, 6, seed=2)
    y = module(part(x, axis, sequence_dim))
    (y * part(weights, axis, sequence_dim)).sum().backward()
    return whole(y.detach(), axis, sequence_dim)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_dim", [0, None])
def test_b021_copies_get_whole_gradients_and_stay_equal(sequence_dim: int | None) -> None:
    axis = Mesh(tp=2).tp
    split, reference = blocks(axis, sequence_dim=sequence_dim), blocks(Axis.single(), sequence_dim=None)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (split, reference)]
    for _ in range(5):
        y = backward(split, axis, sequence_dim)
        torch.testing.assert_close(y, backward(reference, axis, None), rtol=1e-6, atol=1e-8)
        sum_partial_gradients(split.parameters())
        for name, parameter in split.named_parameters():
            if not sharding_of(parameter).splits:  # norm weights and biases, row biases
                assert parameter.grad is not None
                copies = comm.all_gather(parameter.grad.unsqueeze(0), axis)
                assert torch.equal(copies[0], copies[1]), name
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_equal(split, axis)
    one = blocks(axis, sequence_dim=sequence_dim)
    backward(one, axis, sequence_dim)
    alone = blocks(Axis.single(), sequence_dim=None)
    backward(alone, axis, None)
    assert_gradients_equal(one, alone, axis)


@pytest.mark.ranks(2)
def test_b021_a_forgotten_mark_is_found() -> None:
    axis = Mesh(tp=2).tp
    split = blocks(axis, sequence_dim=0, mark=False)
    assert_replicas_equal(split, axis)
    optimizer = torch.optim.Adam(split.parameters(), lr=0.01)
    backward(split, axis, 0)
    sum_partial_gradients(split.parameters())
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"2 ranks of axis 'tp' differ: 0.norm1.weight, 0.norm1.bias, 0.norm2.weight"
    ):
        assert_replicas_equal(split, axis)


@pytest.mark.ranks(4)
def test_copies_of_a_slice_are_compared_among_their_ranks() -> None:
    axis = Mesh(tp=4).tp
    layer = ParallelAttention(8, 4, axis, kv_heads=2)
    assert_replicas_equal(layer, axis)
    if axis.rank == 3:
        with torch.no_grad():
            layer.key.weight[0, 0] += 1
    with pytest.raises(
        RuntimeError, match=r"differ: key.weight; .*, rank 3 differs: at \[0, 0\] rank 3 .* rank 2"
    ):
        assert_replicas_equal(layer, axis)  # on all four
    one = ParallelAttention(8, 4, axis, kv_heads=1)  # whose copies are on all ranks
    assert_replicas_equal(one, axis)
    if axis.rank == 1:
        with torch.no_grad():
            one.value.weight[1, 2] += 1
    with pytest.raises(
        RuntimeError, match=r"differ: value.weight; .*, rank 1 differs: at \[1, 2\] rank 1 .* rank 0"
    ):
        assert_replicas_equal(one, axis)
    block = axis.blocks(2)  # the ranks that share a head
    if block.ranks[0] == 0:
        assert_replicas_equal(layer, block)
    else:
        with pytest.raises(RuntimeError, match=r"on the 2 ranks of axis 'tp' differ: key\.weight;"):
            assert_replicas_equal(layer, block)


@pytest.mark.ranks(4)
def test_the_first_difference_is_told_on_every_rank() -> None:
    axis = Mesh(tp=4).tp
    module = nn.ParameterDict({"a": values(2), "b": values(3, 5), "c": values(4)})
    with torch.no_grad():
        if axis.rank == 2:
            module["b"][1, 3] = 0.25
            module["b"][2, 0] = 7
        if axis.rank in (1, 2):
            module["c"][0] = 1
    expected = (
        r"4 ranks of axis 'tp' differ: b, c; in the first, b, rank 2 differs: at \[1, 3\] rank 2 has 0\.25 and rank 0 "
        rf"has {values(3, 5)[1, 3].item()!r}\. "
    )
    with pytest.raises(RuntimeError, match=expected):
        assert_replicas_equal(module, axis)
    with pytest.raises(
        RuntimeError, match=r"in the first, c, rank 1, rank 2 differ: at \[0\] rank 1 has 1.0 "
    ):
        assert_replicas_equal(nn.ParameterDict({"c": module["c"]}), axis)


@pytest.mark.ranks(4)
def test_slices_within_the_axis_are_no_copies() -> None:
    mesh = Mesh(dp=2, cp=2)
    piece = nn.Parameter(torch.full((2,), float(mesh.cp.rank)))
    comm.set_sharding(piece, Sharding("piece", (4,), (Split(mesh.cp, 0, 2 * mesh.cp.rank),)))
    module = nn.ParameterDict({"piece": piece})
    for axis in (mesh.cp, mesh.dp, mesh.data):
        assert_replicas_equal(module, axis)
    assert_replicas_equal(module, mesh.world)
    if mesh.world.rank == 3:
        piece.data += 1
    with pytest.raises(
        RuntimeError, match=r"axis 'data' differ: piece; .* rank 3 has 2.0 and rank 1 has 1.0"
    ):
        assert_replicas_equal(module, mesh.data)
    assert_replicas_equal(module, mesh.cp)


@pytest.mark.ranks(2)
def test_bits_are_compared() -> None:
    axis = Mesh(tp=2).tp
    module = nn.ParameterDict({"a": torch.full((2,), float("nan")), "b": torch.tensor(0.0)})
    assert_replicas_equal(module, axis)
    with torch.no_grad():
        module["b"].fill_(-0.0 if axis.is_first else 0.0)
    with pytest.raises(RuntimeError, match="differ: b;"):
        assert_replicas_equal(module, axis)


@pytest.mark.ranks(2)
def test_copies_of_other_shapes_are_no_copies() -> None:
    """Also where their bytes are equal, and where one would not fit the other's memory."""
    axis = Mesh(tp=2).tp
    first = axis.is_first
    for own, message in (
        (
            torch.zeros(2, 3) if first else torch.zeros(3, 2),
            r"a is \(2, 3\) of torch.float32 on rank 0 and \(3, 2\)",
        ),
        (torch.zeros(4) if first else torch.zeros(9), r"a is \(4,\) of torch.float32 on rank 0 and \(9,\)"),
        (
            torch.zeros(2, dtype=torch.float32 if first else F64),
            r"torch.float32 on rank 0 and \(2,\) of torch.float64",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            assert_replicas_equal(nn.ParameterDict({"a": own}), axis)
    one = nn.ParameterDict({"a": torch.zeros(2)} | ({} if first else {"b": torch.zeros(2)}))
    with pytest.raises(RuntimeError, match=r"b is \(2,\) of torch.float32 on rank 1 and missing on rank 0"):
        assert_replicas_equal(one, axis)


def test_kinds_are_compared_with_all_that_hold_a_copy() -> None:
    """Over an axis of several factors: with the ranks of each that the parameter is not split over."""

    def axis(name: str, ranks: tuple[int, ...], factors: tuple[Axis, ...] = ()) -> Axis:
        group = torch.distributed.ProcessGroup(0, len(ranks))  # type: ignore[call-arg]
        return Axis(name, ranks, 0, group, factors=factors)

    tp = axis("tp", (0, 1))
    world = axis("world", tuple(range(8)), (axis("dp", (0, 4)), axis("cp", (0, 2)), tp))
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, dtype=F64))
    comm.set_sharding(weight, Sharding("weight", (4, 3), (Split(tp, 0, 0),)))
    assert kinds_of(nn.ParameterDict({"weight": weight, "bias": bias}), world) == {
        "weight": ("(2, 3) of torch.float32", [0, 4, 0, 2]),
        "bias": ("(3,) of torch.float64", list(range(8))),
    }


@pytest.mark.ranks(2)
def test_marking() -> None:
    axis = Mesh(tp=2).tp
    norm = nn.LayerNorm(4)
    comm.set_sharding(norm.bias, Sharding("norm.bias", (4,)))
    mark_partial(norm, axis)
    mark_partial([norm.weight], axis)  # twice is once
    mark_partial(norm.weight, axis)
    assert sharding_of(norm.weight) == Sharding("", (4,), partial=(axis,))
    assert sharding_of(norm.bias) == Sharding("norm.bias", (4,), partial=(axis,))
    with pytest.raises(ValueError, match="is split over axis 'tp'"):
        mark_partial(ColumnParallelLinear(4, 4, axis), axis)
    alone = nn.LayerNorm(4)
    mark_partial(alone, Axis.single())
    assert sharding_of(alone.weight).partial == ()
    assert_replicas_equal(alone, Axis.single())


@pytest.mark.ranks(2)
def test_a_norm_behind_a_split_is_partial_without_sequence_parallelism_too() -> None:
    axis = Mesh(tp=2).tp

    class HeadNorm(nn.Module):
        def __init__(self, over: Axis) -> None:
            super().__init__()
            self.up, self.down = (
                ColumnParallelLinear(6, 8, over, dtype=F64),
                RowParallelLinear(8, 6, over, dtype=F64),
            )
            self.norm = nn.LayerNorm(4, dtype=F64)  # of each head's 4 features; every rank sees other heads
            mark_partial(self.norm, over)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))
            return y

    made = []
    for over in (axis, Axis.single()):
        torch.manual_seed(3)
        made.append(HeadNorm(over))
        (made[-1](values(5, 6)) * values(5, 6, seed=2)).sum().backward()
    assert_near(made[0](values(5, 6)), made[1](values(5, 6)))
    assert_gradients_equal(made[0], made[1], axis)
