"""Products in pieces: what one product with its collective computes, with the same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from packages.comm.tests.live import LiveBytes
from packages.tensor_parallel.tests.reference import assert_near, on_ranks, part, values
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, WeightGradients, gradient_work, split_sizes
from shardweave.tensor_parallel import FusedColumnLinear, RowParallelLinear, column_linear, row_linear
from shardweave.tensor_parallel.adjacency import joined, place_adjacent
from shardweave.tensor_parallel.decomposed import gathered_product, scattered_product

HIDDEN = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A column-parallel product with the layers' sizes ``outputs`` and then a row-parallel one, whole."""

    outputs: tuple[int, ...] = (13,)
    dim: int = 0
    bias: bool = True
    adjacent: bool = True
    keep_inputs: bool = False
    deferred: bool = False
    frozen: bool = False
    """The weights are; the biases and the input are not."""
    tokens: int = 12

    def x(self) -> Tensor:
        shape = [3, 3, HIDDEN]
        shape[self.dim] = self.tokens
        return values(*shape, seed=sum(self.outputs))

    def column(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (values(size, HIDDEN, seed=number), values(size, seed=9 + number))
            for number, size in enumerate(self.outputs)
        ]

    def row(self) -> tuple[Tensor, Tensor]:
        return values(7, sum(self.outputs), seed=3), values(7, seed=4)

    def expected(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of one process, by name."""
        leaves = {"x": self.x()}
        for number, (weight, bias) in enumerate(self.column()):
            leaves |= {f"column.{number}.weight": weight, f"column.{number}.bias": bias}
        leaves["row.weight"], leaves["row.bias"] = self.row()
        for leaf in leaves.values():
            leaf.requires_grad_()
        inner = [
            F.linear(
                leaves["x"], leaves[f"column.{n}.weight"], leaves[f"column.{n}.bias"] if self.bias else None
            )
            for n in range(len(self.outputs))
        ]
        y = F.linear(
            torch.tanh(torch.cat(inner, -1)), leaves["row.weight"], leaves["row.bias"] if self.bias else None
        )
        (y * values(*y.shape, seed=5)).sum().backward()
        return y.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def own_columns(self, axis: Axis) -> list[Tensor]:
        """Which of the row-parallel weight's columns this rank has: those of its part of each layer."""
        starts = [sum(self.outputs[:number]) for number in range(len(self.outputs))]
        found = []
        for start, size in zip(starts, self.outputs, strict=True):
            found.append(torch.arange(start, start + size).split(split_sizes(size, axis.size))[axis.rank])
        return found


CASES = [
    Case(),
    Case(dim=1, bias=False),
    Case(outputs=(13, 6, 1), keep_inputs=True),
    Case(outputs=(4, 11), adjacent=False, dim=1, keep_inputs=True),
    Case(outputs=(4, 11), adjacent=False, deferred=True),
    Case(outputs=(4, 9), deferred=True, keep_inputs=True, dim=1),
    Case(outputs=(2,), frozen=True),
    Case(outputs=(5, 3), tokens=0),
]


def cut(whole: Tensor, axis: Axis, dim: int) -> nn.Parameter:
    own = torch.split(whole.detach(), list(split_sizes(whole.shape[dim], axis.size)), dim)[axis.rank]
    return nn.Parameter(own.clone())


def run(case: Case, axis: Axis, decomposed: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output, and this rank's gradients by name."""
    x = part(case.x(), axis, case.dim).clone().requires_grad_()
    weights = [cut(weight, axis, 0) for weight, _ in case.column()]
    biases = [cut(bias, axis, 0) for _, bias in case.column()]
    if case.adjacent:
        place_adjacent(weights)
        place_adjacent(biases)
    else:
        weights = weights[::-1]
        place_adjacent(weights)  # in another order than they are used in
        weights = weights[::-1]
        assert joined(weights) is None
    columns = torch.cat(case.own_columns(axis))
    row_weight = nn.Parameter(case.row()[0][:, columns].clone())
    row_bias = nn.Parameter(case.row()[1])
    for weight in (*weights, row_weight):
        weight.requires_grad_(not case.frozen)
    queue = WeightGradients()
    if case.deferred:
        for weight in (*weights, row_weight):
            gradient_work(weight).queue = queue
    inner = column_linear(
        x,
        weights,
        biases if case.bias else [None] * len(biases),
        axis,
        sequence_dim=case.dim,
        keep_inputs=case.keep_inputs,
        decomposed=decomposed,
    )
    y = row_linear(
        torch.tanh(inner),
        row_weight,
        row_bias if case.bias else None,
        axis,
        sequence_dim=case.dim,
        decomposed=decomposed,
    )
    upstream = values(
        *(size * (axis.size if dim == case.dim else 1) for dim, size in enumerate(y.shape)), seed=5
    )
    (y * part(upstream, axis, case.dim)).sum().backward()
    queue.run()
    found = {"x": x.grad, "row.weight": row_weight.grad, "row.bias": row_bias.grad}
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        found |= {f"column.{number}.weight": weight.grad, f"column.{number}.bias": bias.grad}
    return y.detach(), found


def mine(case: Case, axis: Axis, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a gradient of one process."""
    if name == "x":
        return part(whole, axis, case.dim)
    if name == "row.weight":
        return whole[:, torch.cat(case.own_columns(axis))]
    return torch.split(whole, list(split_sizes(whole.shape[0], axis.size)))[axis.rank]


@on_ranks
def test_products_in_pieces_are_those_of_one_process(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for case in CASES:
        expected, gradients = case.expected()
        y, found = run(case, axis, decomposed=True)
        assert_near(y, part(expected, axis, case.dim), f"{case}")
        for name, gradient in found.items():
            if name.endswith("bias") and not case.bias:
                continue
            if name == "row.bias":
                # Partial: of this rank's tokens.
                upstream = part(values(*expected.shape, seed=5), axis, case.dim)
                assert_near(gradient, upstream.sum((0, 1)), name)
            elif name.endswith("weight") and case.frozen:
                assert gradient is None
            else:
                assert_near(gradient, mine(case, axis, name, gradients[name]), f"{name} of {case}")


@pytest.mark.ranks(3)
def test_the_same_bytes_are_sent() -> None:
    mesh = Mesh(tp=3)
    for case in CASES:
        sent = []
        for decomposed in (False, True):
            mesh.ledger.reset()
            run(case, mesh.tp, decomposed)
            sent.append(mesh.ledger.total().sent)
        assert sent[0] == sent[1], case
    # Of the four collectives of a column's and a row's pass that follow each other in this case, three are in pieces.
    mesh.ledger.reset()
    run(Case(), mesh.tp, decomposed=True)
    calls = {kind: total.calls for kind, total in mesh.ledger.by("kind").items()}
    assert calls == {"send": 3 * 2, "receive": 3 * 2, "all_gather": 1, "reduce_scatter": 1}
    mesh.ledger.reset()
    run(Case(frozen=True), mesh.tp, decomposed=True)
    assert {kind for kind, total in mesh.ledger.by("kind").items() if total.calls} == {"send", "receive"}


@pytest.mark.ranks(4)
def test_the_gathered_input_is_never_whole() -> None:
    """Its shards come and go: this rank's own, one in use and one that comes, where the plain way has all of them."""
    axis = Mesh(tp=4).tp
    shard = torch.ones(1 << 12, 8)
    whole, outputs = 4 * shard.nbytes, 4 * (1 << 12) * 4

    def multiply(rows: Tensor, out: Tensor) -> None:
        torch.mm(rows, torch.ones(8, 1), out=out)

    for keep in (False, True):
        live = LiveBytes(float("inf") if keep else 3 * shard.nbytes + outputs)
        with live:
            y, gathered = gathered_product(shard, multiply, 1, axis, 0, keep=keep)
        assert torch.equal(y, torch.full((1 << 14, 1), 8.0))
        assert (live.peak >= whole + outputs) == keep
        assert gathered is None or gathered.nbytes == whole


@pytest.mark.ranks(3)
def test_summands_of_16_bits_are_added_up_wide_and_rounded_once() -> None:
    axis = Mesh(tp=3).tp
    x = (torch.tensor([256.0, 1.0, 1.0])[axis.rank] * torch.ones(6, 2)).bfloat16()

    def multiply(rows: Tensor, out: Tensor) -> None:
        out.copy_(rows)

    total = scattered_product(x, multiply, 2, axis, 0)
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, torch.full((2, 2), 258.0).bfloat16())  # 256 + 1 is 256 in bfloat16


@pytest.mark.ranks(2)
def test_autocast_computes_in_pieces_what_it_computes_at_once() -> None:
    axis = Mesh(tp=2).tp
    torch.manual_seed(1)
    for dim in (0, 1):
        x = part(torch.randn(4, 6, 16), axis, dim)
        up = FusedColumnLinear(16, {"gate": 12, "up": 20}, axis, sequence_dim=dim, decomposed=True)
        down = RowParallelLinear(20, 16, axis, sequence_dim=dim, decomposed=True)
        results = []
        for decomposed in (True, False):
            for column in up.fused():
                column.decomposed = decomposed
            down.decomposed = decomposed
            own = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = down(up(own)[1])
            y.float().square().sum().backward()
            assert own.grad is not None
            assert own.grad.dtype == torch.float32
            results.append((y, own.grad))
        for found, right in zip(*results, strict=True):
            assert found.dtype == right.dtype
            assert (found - right).abs().max() <= 0.02 * right.abs().max()


def kinds(cases: list[Case]) -> Iterator[str]:
    for case in cases:
        yield from (field.name for field in dataclasses.fields(case) if getattr(case, field.name) is True)


def test_every_option_occurs() -> None:
    names = {field.name for field in dataclasses.fields(Case) if field.type == "bool"}
    assert set(kinds(CASES)) == names
