"""What is owed survives another bucket layout, a resume, another number of workers, another kind of compression."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import (
    Axis,
    CompressedReduction,
    Compression,
    EightBit,
    Mesh,
    OneBit,
    PowerSGD,
    Residual,
    Segment,
    TopK,
    TwoBit,
    clip_segments,
    consecutive_segments,
    redistribute_residuals,
)
from shardweave.comm.compression.residuals import outside
from shardweave.comm.testing import run_ranks

SHAPES = {"w": (20, 24), "b": (9,), "v": (16, 18)}
SIZES = {"w": 480, "b": 9, "v": 288}
KINDS = [OneBit(block=64), TwoBit(block=64), EightBit(block=64), TopK(density=0.05), PowerSGD(rank=2)]


def data_axis() -> Axis:
    return Mesh(dp=torch.distributed.get_world_size()).dp


def gradients(worker: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return {n: torch.randn(size, generator=generator, dtype=torch.float64) + 0.5 for n, size in SIZES.items()}


class Buckets:
    """One reduction for each bucket, given as names in their order: a training loop's side of it."""

    def __init__(self, options: Compression, axis: Axis, layout: Sequence[Sequence[str]]) -> None:
        self.axis = axis
        self.segments = [consecutive_segments({name: SHAPES[name] for name in names}) for names in layout]
        self.reductions = [
            CompressedReduction(options, axis, segments, dtype=torch.float64) for segments in self.segments
        ]

    def step(self, step: int, op: str = "mean") -> dict[str, Tensor]:
        """The reduced gradients of a step."""
        mine = gradients(self.axis.rank, step)
        reduced: dict[str, Tensor] = {}
        for segments, reduction in zip(self.segments, self.reductions, strict=True):
            buffer = reduction.reduce(torch.cat([mine[s.name] for s in segments]), op)
            reduction.step()
            reduced |= {s.name: buffer[s.offset : s.end] for s in segments}
        return reduced

    def pieces(self) -> list[Residual]:
        return [piece for reduction in self.reductions for piece in reduction.residuals()]

    def owed(self) -> dict[str, Tensor]:
        """mean over workers + owners, by name."""
        total = owed_by(self.pieces(), self.axis.size)
        return {name: comm.all_reduce(values, self.axis) for name, values in total.items()}


def owed_by(pieces: Sequence[Residual], workers: int) -> dict[str, Tensor]:
    total = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for piece in pieces:
        share = {"worker": 1 / workers, "owner": 1.0}.get(piece.kind)
        if share is not None:
            total[piece.name][piece.begin : piece.begin + piece.values.numel()] += share * piece.values
    return total


def all_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[n], other[n], rtol=1e-9, atol=1e-9) for n in one
    )


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.ranks(2)
def test_b135_what_is_owed_survives_a_change_of_layout(feedback: bool) -> None:
    """Top-1 of a constant gradient; after the first step its parameters lie in another order."""
    axis = data_axis()
    options = TopK(density=0.25, error_feedback=feedback)
    constant = {"a": torch.tensor([1.0, 0.6]), "b": torch.tensor([0.35]), "c": torch.tensor([0.1])}
    applied = {name: torch.zeros_like(values) for name, values in constant.items()}
    order = ["a", "b", "c"]
    reduction = CompressedReduction(options, axis, consecutive_segments({"a": (2,), "b": (1,), "c": (1,)}))
    for step in range(40):
        if step == 1:
            order = ["c", "a", "b"]
            shapes = {name: tuple(constant[name].shape) for name in order}
            changed = CompressedReduction(options, axis, consecutive_segments(shapes))
            changed.load_state_dict(reduction.state_dict())
            reduction = changed
        buffer = reduction.reduce(torch.cat([constant[name] for name in order]))
        reduction.step()
        for name, values in zip(order, buffer.split([len(constant[name]) for name in order]), strict=True):
            applied[name] += values
    total = torch.cat(list(applied.values()))
    if not feedback:
        assert total.tolist() == [40.0, 0.0, 0.0, 0.0]
        return
    torch.testing.assert_close(total, torch.tensor([39.0, 24.0, 13.3, 3.1]), rtol=0, atol=1.0)
    for piece in reduction.residuals():
        owed = piece.values + applied[piece.name][piece.begin : piece.begin + piece.values.numel()]
        torch.testing.assert_close(owed, 40 * constant[piece.name], rtol=2e-6, atol=2e-6)


def relaid(workers: int) -> None:
    """Two buckets become three, in another order; owners change, and nothing is sent for it."""
    axis = data_axis()
    for options in KINDS:
        old = Buckets(options, axis, [["w", "b"], ["v"]])
        applied = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
        given = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
        buckets = old
        for step in range(6):
            if step == 3:
                sent = axis.ledger.total("dp").sent
                buckets = Buckets(options, axis, [["v"], ["b"], ["w"]])
                for reduction in buckets.reductions:
                    reduction.load_state_dict(*(other.state_dict() for other in old.reductions))
                assert axis.ledger.total("dp").sent == sent
                assert [reduction.steps for reduction in buckets.reductions] == [3] * 3
                assert all_close(buckets.owed(), old.owed())
            reduced = buckets.step(step)
            for name in SIZES:
                applied[name] += reduced[name]
                given[name] += sum(gradients(worker, step)[name] for worker in range(workers)) / workers
        total = {name: applied[name] + values for name, values in buckets.owed().items()}
        assert all_close(total, given), options


@pytest.mark.parametrize("workers", [2, 3])
def test_buckets_of_another_layout_owe_the_same(workers: int) -> None:
    run_ranks(relaid, workers, workers)


@pytest.mark.parametrize("options", [*KINDS, TopK(density=0.05, momentum=0.9)])
@pytest.mark.ranks(2)
def test_a_resumed_run_is_the_run(options: Compression) -> None:
    """Bit for bit, from a file that holds nothing but plain values and tensors."""
    axis = data_axis()
    layout = [["w"], ["b", "v"]]
    straight, before, resumed = (Buckets(options, axis, layout) for _ in range(3))
    for step in range(3):
        straight.step(step)
        before.step(step)
    for old, new in zip(before.reductions, resumed.reductions, strict=True):
        file = io.BytesIO()
        torch.save(old.state_dict(), file)
        before_loading = old.state_dict()
        file.seek(0)
        new.load_state_dict(torch.load(file, weights_only=True))
        old.load_state_dict(before_loading)  # its own state, too
    for step in range(3, 5):
        right = straight.step(step)
        for reduced in (resumed.step(step), before.step(step)):
            assert all(torch.equal(reduced[name], right[name]) for name in SIZES)


@pytest.mark.ranks(2)
def test_a_state_of_another_worker_is_refused() -> None:
    axis = data_axis()
    reduction = CompressedReduction(OneBit(), axis, consecutive_segments(SHAPES))
    state = reduction.state_dict()
    for change in ({"worker": 1 - axis.rank}, {"workers": 3}):
        with pytest.raises(ValueError, match="redistribute_residuals"):
            reduction.load_state_dict(state | change)


def saved(op: str) -> list[list[tuple[Any, ...]]]:
    """This worker's pieces after three steps, of each kind of compression."""
    axis, rows = data_axis(), []
    for options in KINDS:
        buckets = Buckets(options, axis, [["w", "b"], ["v"]])
        for step in range(3):
            buckets.step(step, op)
        rows.append([(p.kind, p.worker, p.name, p.begin, p.values.tolist()) for p in buckets.pieces()])
    return rows


def continued(pieces: list[list[Residual]], before: int, op: str) -> list[dict[str, list[float]]]:
    """What is owed by another number of workers that loaded those pieces, in another layout, of each kind."""
    axis, owed = data_axis(), []
    for options, of_kind in zip(KINDS, pieces, strict=True):
        buckets = Buckets(options, axis, [["v", "w"], ["b"]])
        for reduction in buckets.reductions:
            reduction.load(redistribute_residuals(of_kind, before=before, after=axis.size, op=op))
        own = [p for p in buckets.pieces() if p.kind == "worker"]
        first = {p.name: comm.broadcast(p.values.clone(), axis) for p in own}
        assert all(torch.equal(p.values, first[p.name]) for p in own)  # all new workers begin alike
        owed.append({name: values.tolist() for name, values in buckets.owed().items()})
        buckets.step(3, op)
    return owed


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_another_number_of_workers_owes_the_same(op: str) -> None:
    by_worker = run_ranks(saved, 2, op)
    pieces = [
        [
            Residual(k, w, n, b, torch.tensor(v, dtype=torch.float64))
            for rows in both
            for k, w, n, b, v in rows
        ]
        for both in zip(*by_worker, strict=True)
    ]
    for workers in (1, 3, 4):
        scale = 2 / workers if op == "sum" else 1.0  # of sums, the total over the workers is what stays
        for of_rank in run_ranks(continued, workers, pieces, 2, op):
            for options, old, owed in zip(KINDS, pieces, of_rank, strict=True):
                right = {name: values * scale for name, values in owed_by(old, 2).items()}
                got = {name: torch.tensor(values, dtype=torch.float64) for name, values in owed.items()}
                assert all_close(got, right), (options, workers)


@pytest.mark.parametrize("after", [TopK(density=0.05), PowerSGD(rank=2), TwoBit(block=32)])
@pytest.mark.ranks(2)
def test_another_kind_pays_what_one_bit_owed(after: Compression) -> None:
    axis = data_axis()
    old = Buckets(OneBit(block=64), axis, [["w", "b", "v"]])
    for step in range(2):
        old.step(step)
    for reload in ("own state", "all pieces"):
        new = Buckets(after, axis, [["w"], ["v", "b"]])
        everyone = gathered(old.pieces(), axis)
        for reduction in new.reductions:
            if reload == "own state":
                reduction.load_state_dict(old.reductions[0].state_dict())
            else:
                reduction.load(everyone)
        assert all_close(new.owed(), old.owed()), reload


def gathered(pieces: Sequence[Residual], axis: Axis) -> list[Residual]:
    rows = [(p.kind, p.worker, p.name, p.begin, p.values.tolist()) for p in pieces]
    return [
        Residual(kind, worker, name, begin, torch.tensor(values, dtype=torch.float64))
        for of_rank in comm.gather_values(rows, axis)
        for kind, worker, name, begin, values in of_rank
    ]


def test_one_rank_pays_what_many_owed() -> None:
    """And then is the identity again."""
    reduction = CompressedReduction(OneBit(), Axis.single(), [Segment("a", 0, 4)], dtype=torch.float64)
    old = [
        Residual("worker", 0, "a", 0, torch.tensor([1.0, 2.0, 3.0, 4.0])),
        Residual("worker", 1, "a", 0, torch.tensor([3.0, 0.0, 1.0, 0.0])),
        Residual("owner", None, "a", 2, torch.tensor([0.25, 0.5])),
    ]
    reduction.load(redistribute_residuals(old, before=2, after=1))
    assert reduction.reduce(torch.ones(4, dtype=torch.float64)).tolist() == [3.0, 2.0, 3.25, 3.5]
    assert reduction.reduce(torch.ones(4, dtype=torch.float64)).tolist() == [1.0] * 4
    reduction.undo()
    half = CompressedReduction(OneBit(), Axis.single(), [Segment("a", 0, 1)], dtype=torch.bfloat16)
    half.load([Residual("worker", 0, "a", 0, torch.tensor([0.001]))])
    assert half.reduce(torch.tensor([1.0], dtype=torch.bfloat16)).item() == 1.0  # too little to be seen, so
    assert next(half.residuals()).values.item() == pytest.approx(0.001, rel=1e-3)  # it stays owed
    half.reduce(torch.tensor([torch.inf], dtype=torch.bfloat16))
    assert next(half.residuals()).values.item() == pytest.approx(0.001, rel=1e-3)


def test_residuals_without_error_feedback_are_refused() -> None:
    reduction = CompressedReduction(OneBit(error_feedback=False), Axis.single(), [Segment("a", 0, 1)])
    with pytest.raises(ValueError, match="turn error_feedback on"):
        reduction.load([Residual("worker", 0, "a", 0, torch.ones(1))])
    reduction.load([])


def test_redistribution_is_a_function_of_pieces() -> None:
    pieces = [
        Residual("worker", 0, "a", 0, torch.tensor([1.0])),
        Residual("momentum", 1, "a", 0, torch.tensor([6.0])),
        Residual("owner", None, "a", 0, torch.tensor([5.0])),
        Residual("factor", None, "a", 0, torch.tensor([7.0])),
    ]

    def after(workers: int, op: str) -> list[tuple[str, int | None, float]]:
        got = redistribute_residuals(pieces, before=2, after=workers, op=op)
        return [(piece.kind, piece.worker, piece.values.item()) for piece in got]

    mean = [("worker", None, 0.5), ("momentum", None, 3.0), ("owner", None, 5.0), ("factor", None, 7.0)]
    total = [("worker", None, 0.25), ("momentum", None, 1.5), ("owner", None, 2.5), ("factor", None, 7.0)]
    assert after(4, "mean") == mean
    assert after(4, "sum") == total
    assert after(2, "sum") == [("worker", 0, 1.0), ("momentum", 1, 6.0), *mean[2:]]
    with pytest.raises(ValueError, match="op 'max'"):
        after(4, "max")
    with pytest.raises(ValueError, match="at least 1"):
        after(0, "mean")


def test_the_rest_of_a_piece() -> None:
    piece = Residual("owner", None, "a", 10, torch.arange(10.0, 20.0))
    for ranges, rest in (
        ([], [(10, 20)]),
        ([(0, 30)], []),
        ([(12, 14)], [(10, 12), (14, 20)]),
        ([(18, 40), (0, 11), (13, 13)], [(11, 13), (13, 18)]),
    ):
        parts = list(outside(piece, ranges))
        assert [(part.begin, part.begin + part.values.numel()) for part in parts] == rest
        assert all(part.values[0].item() == part.begin for part in parts)


@pytest.mark.ranks(4)
def test_parts_of_a_buffer_between_nodes() -> None:
    """Two nodes of two: reduce-scatter inside, compress this rank's part between nodes, gather inside."""
    mesh = Mesh(dp=4)
    inside = mesh.dp.blocks(2)
    across = mesh.dp.subset([0, 2] if mesh.dp.rank % 2 == 0 else [1, 3])
    assert across is not None
    segments = consecutive_segments(SHAPES)
    length = segments[-1].end
    for options in KINDS:
        sizes = options.cut(segments, 2, length)
        lo = sizes[0] * inside.rank
        part = clip_segments(segments, lo, lo + sizes[inside.rank])
        reduction = CompressedReduction(options, across, part, length=sizes[inside.rank], dtype=torch.float64)
        applied, given = torch.zeros(2, length, dtype=torch.float64)
        for step in range(4):
            whole = torch.cat(list(gradients(mesh.dp.rank, step).values()))
            given += sum(torch.cat(list(gradients(worker, step).values())) for worker in range(4)) / 4
            mine = comm.reduce_scatter(whole, inside, sizes=sizes, op="mean")
            reduction.reduce(mine)
            applied += comm.all_gather(mine, inside, sizes=sizes)
        everyone = owed_by(list(reduction.residuals()), 2)
        owed = comm.all_reduce(torch.cat(list(everyone.values())), mesh.dp)
        torch.testing.assert_close(applied + owed, given, rtol=1e-9, atol=1e-9)
        if isinstance(options, PowerSGD):
            assert {piece.name for piece in reduction.residuals() if piece.kind == "factor"} <= {"w", "v"}
            named = comm.gather_values([p.name for p in reduction.residuals() if p.kind == "factor"], inside)
            assert sorted(name for names in named for name in names) == ["v", "w"]  # no matrix was cut
