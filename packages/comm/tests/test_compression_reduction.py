"""The compressed reductions, against each algorithm written down as plain loops over workers.

Gradients differ per worker, step and element. The references know nothing of buffers, chunks or bytes. They are in
float64; so is the reduction there, but for the float32 numbers it puts on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
    Segment,
    TopK,
    TwoBit,
    consecutive_segments,
)
from shardweave.comm.compression.grid import Grid
from shardweave.comm.random import named_generator
from shardweave.comm.testing import run_ranks

SHAPES = {"w": (24, 30), "b": (7,), "conv": (10, 6, 5), "small": (3, 2)}
LENGTH = 24 * 30 + 7 + 300 + 6
KINDS = [
    OneBit(block=64),
    TwoBit(block=64),
    EightBit(block=64),
    TopK(density=0.05),
    PowerSGD(rank=2),
]


def axes() -> list[Axis]:
    """The whole world by its group, and the same ranks without a group of their own."""
    mesh = Mesh(dp=torch.distributed.get_world_size())
    virtual = mesh.dp.subset(range(mesh.dp.size))
    assert virtual is not None
    return [mesh.dp, virtual]


def gradient(worker: int, step: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    values = torch.randn(length, generator=generator, dtype=torch.float64) ** 3
    common = torch.randn(length, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (values + common).to(dtype)


def same_everywhere(values: Tensor, axis: Axis) -> bool:
    rows = comm.all_gather(values.contiguous().view(1, -1), axis)
    return all(torch.equal(row.view(torch.uint8), rows[0].view(torch.uint8)) for row in rows)


def owed(reduction: CompressedReduction, length: int, axis: Axis) -> Tensor:
    """mean over workers of their residuals + the owners', for segments that lie in the buffer as in their parameter."""
    mine = torch.zeros(length, dtype=torch.float64)
    offsets = {s.name: s.offset for s in consecutive_segments(SHAPES)} | {"flat": 0}
    for piece in reduction.residuals():
        share = {"worker": 1 / axis.size, "owner": 1.0}.get(piece.kind, 0.0)
        start = offsets[piece.name] + piece.begin
        if share:
            mine[start : start + piece.values.numel()] += share * piece.values.double()
    return comm.all_reduce(mine, axis)


# One process' word for each algorithm: (per-worker gradients of one step, memory) -> what is applied.

Reference = Callable[[list[Tensor], dict[str, Tensor]], Tensor]


def blockwise(x: Tensor, block: int, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([quantize(part) for part in x.split(block)]) if x.numel() else x


def rounded(x: Tensor, wire: torch.dtype = torch.bfloat16) -> Tensor:
    """As it arrives: scales as bfloat16."""
    return x.to(wire).to(x.dtype)


def one_bit(x: Tensor) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0).double() * rounded(x.abs().mean())


def two_bit(x: Tensor) -> Tensor:
    large = x.abs() > x.square().mean().sqrt()
    small, big = (rounded(x[part].abs().mean()) if part.any() else x.sum() * 0 for part in (~large, large))
    return torch.where(x < 0, -1.0, 1.0).double() * torch.where(large, big, small)


def eight_bit(x: Tensor) -> Tensor:
    scale = rounded(x.abs().max() / 127)
    return (x / scale).round() * scale


def averaged(quantize: Callable[[Tensor], Tensor], block: int) -> Reference:
    """1-bit Adam's compressed all-reduce, with the owner's residual as a whole vector; two workers need no owner."""

    def reference(gradients: list[Tensor], memory: dict[str, Tensor]) -> Tensor:
        total = torch.zeros_like(gradients[0])
        for worker, g in enumerate(gradients):
            corrected = g + memory.get(f"worker {worker}", torch.zeros_like(g))
            sent = blockwise(corrected, block, quantize)
            memory[f"worker {worker}"] = corrected - sent
            total += sent
        if len(gradients) == 2:
            return total / 2
        corrected = total / len(gradients) + memory.get("owner", torch.zeros_like(total))
        result = blockwise(corrected, block, quantize)
        memory["owner"] = corrected - result
        return result

    return reference


def top_k(density: float, momentum: float | None = None, masking: bool = True) -> Reference:
    """Deep Gradient Compression, algorithm 4; without momentum, plain memory."""

    def reference(gradients: list[Tensor], memory: dict[str, Tensor]) -> Tensor:
        total = torch.zeros_like(gradients[0])
        for worker, g in enumerate(gradients):
            u, v = (memory.get(f"{name} {worker}", torch.zeros_like(g)) for name in "uv")
            u = g if momentum is None else momentum * u + g
            v = v + u
            mask = torch.zeros(len(v), dtype=torch.bool)
            mask[v.abs().argsort(descending=True)[: round(density * len(v))]] = True
            sent = torch.where(mask, rounded(v, torch.float32), 0)
            total += sent
            memory[f"v {worker}"] = v - sent
            memory[f"u {worker}"] = torch.where(mask & torch.tensor(masking), 0, u)
        return total / len(gradients)

    return reference


def power_sgd(rank: int) -> Reference:
    """Vogels et al., algorithms 1 and 2; w and conv are worth it, b and small are not."""

    def reference(gradients: list[Tensor], memory: dict[str, Tensor]) -> Tensor:
        result = torch.stack(gradients).mean(0)
        for segment, shape in zip(consecutive_segments(SHAPES), SHAPES.values(), strict=True):
            if segment.name not in ("w", "conv"):
                continue
            rows, place = shape[0], slice(segment.offset, segment.end)
            columns = segment.size // rows
            q = memory.get(f"q {segment.name}")
            if q is None:
                drawn = torch.randn(columns * rank, generator=named_generator("powersgd", segment.name))
                q = drawn.double().view(columns, rank)
            matrices = [
                (g[place] + memory.get(f"{segment.name} {worker}", torch.zeros(segment.size))).view(
                    rows, columns
                )
                for worker, g in enumerate(gradients)
            ]
            p = torch.stack([matrix @ q for matrix in matrices]).mean(0)
            p = torch.linalg.svd(p, full_matrices=False).U @ torch.linalg.svd(p, full_matrices=False).Vh
            q = torch.stack([matrix.T @ p for matrix in matrices]).mean(0)
            memory[f"q {segment.name}"] = q
            for worker, matrix in enumerate(matrices):
                memory[f"{segment.name} {worker}"] = (matrix - p @ q.T).flatten()
            result[place] = (p @ q.T).flatten()
        return result

    return reference


def of_velocities(momentum: float, algorithm: Reference) -> Reference:
    """The algorithm on velocities instead of gradients."""

    def reference(gradients: list[Tensor], memory: dict[str, Tensor]) -> Tensor:
        for worker, g in enumerate(gradients):
            before = memory.get(f"velocity {worker}", torch.zeros_like(g))
            memory[f"velocity {worker}"] = momentum * before + g
        return algorithm([memory[f"velocity {worker}"] for worker in range(len(gradients))], memory)

    return reference


def grid_block(workers: int, block: int = 64) -> int:
    return Grid.of(LENGTH, workers, block).block


def algorithms(workers: int) -> list[tuple[Compression, Reference]]:
    block = grid_block(workers)
    return [
        (OneBit(block=64), averaged(one_bit, block)),
        (OneBit(block=64, momentum=0.9), of_velocities(0.9, averaged(one_bit, block))),
        (TwoBit(block=64), averaged(two_bit, block)),
        (EightBit(block=64), averaged(eight_bit, block)),
        (TopK(density=0.05), top_k(0.05)),
        (TopK(density=0.05, momentum=0.9), top_k(0.05, 0.9)),
        (TopK(density=0.05, momentum=0.9, masking=False), top_k(0.05, 0.9, masking=False)),
        (PowerSGD(rank=2), power_sgd(2)),
        (PowerSGD(rank=2, momentum=0.5), of_velocities(0.5, power_sgd(2))),
    ]


def compare(op: str) -> None:
    for axis in axes():
        for options, reference in algorithms(axis.size):
            reduction = CompressedReduction(options, axis, consecutive_segments(SHAPES), dtype=torch.float64)
            memory: dict[str, Tensor] = {}
            for step in range(5):
                right = reference([gradient(worker, step) for worker in range(axis.size)], memory)
                buffer = gradient(axis.rank, step)
                assert reduction.reduce(buffer, op) is buffer
                reduction.step()
                right = right * (axis.size if op == "sum" else 1)
                assert torch.allclose(buffer, right, rtol=1e-6, atol=1e-6), (options, step)
                assert same_everywhere(buffer, axis), (options, step)


@pytest.mark.parametrize("workers, op", [(2, "mean"), (3, "sum"), (4, "mean")])
def test_each_kind_is_its_algorithm(workers: int, op: str) -> None:
    run_ranks(compare, workers, op)


def balance(axis: Axis, options: Compression, length: int, dtype: torch.dtype, op: str) -> None:
    """Applied + owed = sum of the gradients, whatever is sent."""
    reduction = CompressedReduction(options, axis, [Segment("flat", 0, length)], dtype=dtype)
    applied, given = torch.zeros(2, length, dtype=torch.float64)
    for step in range(6):
        everyone = [gradient(worker, step, 2 * length, dtype)[::2] for worker in range(axis.size)]
        buffer = everyone[axis.rank]  # not contiguous
        given += torch.stack(everyone).double().mean(0)
        reduction.reduce(buffer, op)
        assert same_everywhere(buffer, axis)
        applied += buffer.double() / (axis.size if op == "sum" else 1)
    # What is owed is kept in float32 or wider. The result is rounded to the buffer's type, as by any reduction.
    tolerance = 6 * torch.finfo(dtype).eps
    total = applied + owed(reduction, length, axis)
    assert torch.allclose(total, given, rtol=2 * tolerance, atol=30 * tolerance), (options, length, dtype)


def balances() -> None:
    own_group, virtual = axes()
    for options in KINDS:
        for length in (0, 1, 7, 2 * 64 * own_group.size + 1):
            balance(own_group, options, length, torch.float32, "mean")
        balance(virtual, options, 131, torch.float64, "sum")


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_nothing_is_lost_at_any_length(workers: int) -> None:
    run_ranks(balances, workers)


@pytest.mark.ranks(2)
def test_nothing_is_lost_of_short_floats() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for options in KINDS:
            balance(axes()[0], options, 1031, dtype, "mean")


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.ranks(2)
def test_plain_steps_come_first_and_are_exact(options: Compression) -> None:
    axis = axes()[0]
    reduction = CompressedReduction(
        replace(options, warmup=2), axis, consecutive_segments(SHAPES), dtype=torch.float64
    )
    for step in range(4):
        buffer = gradient(axis.rank, step)
        reduction.reduce(buffer.clone())  # a second bucket of the same step, say: buckets do not count
        reduction.undo()
        reduction.reduce(buffer)
        right = (gradient(0, step) + gradient(1, step)) / 2
        assert torch.allclose(buffer, right, rtol=1e-14) == (step < 2)
        reduction.step()


@pytest.mark.parametrize("kind", [TopK, OneBit, PowerSGD])
@pytest.mark.ranks(2)
def test_velocities_of_plain_steps_are_sgd_with_momentum(kind: type[Compression]) -> None:
    axis = axes()[0]
    options = kind(momentum=0.5, warmup=4)
    reduction = CompressedReduction(options, axis, [Segment("flat", 0, 20)], dtype=torch.float64)
    velocity = torch.zeros(20, dtype=torch.float64)
    for step in range(4):
        buffer = gradient(axis.rank, step, 20)
        velocity = 0.5 * velocity + (gradient(0, step, 20) + gradient(1, step, 20)) / 2
        torch.testing.assert_close(reduction.reduce(buffer), velocity)
        reduction.step()


@pytest.mark.parametrize("kind", [TopK, OneBit, PowerSGD])
@pytest.mark.ranks(2)
def test_a_step_reduced_in_several_goes_decays_its_velocity_once(kind: type[Compression]) -> None:
    axis = axes()[0]
    options = kind(momentum=0.5, warmup=4)
    whole, parted = (
        CompressedReduction(options, axis, [Segment("flat", 0, 20)], dtype=torch.float64) for _ in range(2)
    )
    for step in range(4):
        parts = [gradient(axis.rank, 10 * step + part, 20) for part in range(3)]
        together = whole.reduce(sum(parts, torch.zeros(20, dtype=torch.float64)))
        in_parts = sum((parted.reduce(part) for part in parts), torch.zeros(20, dtype=torch.float64))
        torch.testing.assert_close(in_parts, together, rtol=1e-13, atol=1e-13)
        whole.step()
        parted.step()


@pytest.mark.ranks(2)
def test_velocities_sent_in_several_goes_are_all_sent_in_the_end() -> None:
    """What arrived and what is owed make up the mean velocities, summed over the steps."""
    axis = axes()[0]
    reduction = CompressedReduction(
        OneBit(block=32, momentum=0.5), axis, [Segment("flat", 0, 70)], dtype=torch.float64
    )
    arrived, due, velocity = (torch.zeros(70, dtype=torch.float64) for _ in range(3))
    for step in range(6):
        for part in range(3):
            mean = (gradient(0, 10 * step + part, 70) + gradient(1, 10 * step + part, 70)) / 2
            velocity = mean + (velocity if part else 0.5 * velocity)
            arrived += reduction.reduce(gradient(axis.rank, 10 * step + part, 70))
        due += velocity
        reduction.step()
    owed = torch.zeros(70, dtype=torch.float64)
    for piece in reduction.residuals():
        if piece.kind == "worker":
            owed[piece.begin : piece.begin + piece.values.numel()] += piece.values
    comm.all_reduce(owed, axis, "mean")
    torch.testing.assert_close(arrived + owed, due, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [*KINDS, TopK(density=0.5, momentum=0.9), OneBit(momentum=0.9)])
def test_one_rank_is_the_identity(options: Compression) -> None:
    reduction = CompressedReduction(options, Axis.single(), consecutive_segments(SHAPES))
    buffer = gradient(0, 0, dtype=torch.float32)
    before = buffer.clone()
    for op in ("mean", "sum"):
        assert torch.equal(reduction.reduce(buffer, op), before)
        reduction.undo()
    assert not [piece for piece in reduction.residuals() if piece.kind in ("worker", "owner")]


@pytest.mark.parametrize(
    "options",
    [*KINDS, *(replace(options, error_feedback=False) for options in KINDS), OneBit(block=64, momentum=0.9)],
)
@pytest.mark.ranks(2)
def test_what_is_not_finite_is_told_to_all_and_stays_out_of_what_is_owed(options: Compression) -> None:
    """On one worker one element: its block, or its buffer, is infinite on both, and owes what it owed before."""
    for bad in (torch.inf, torch.nan):
        one_bad_element(options, axes()[0], bad)


def one_bad_element(options: Compression, axis: Axis, bad: float) -> None:
    reduction = CompressedReduction(options, axis, consecutive_segments(SHAPES))
    reduction.reduce(gradient(axis.rank, 0, dtype=torch.float32))
    reduction.step()
    before = [(piece, piece.values.clone()) for piece in reduction.residuals()]
    buffer = gradient(axis.rank, 1, dtype=torch.float32)
    if axis.rank == 1:
        buffer[700] = bad
    reduction.reduce(buffer)
    assert same_everywhere(buffer, axis)
    block = grid_block(2) if isinstance(options, OneBit | TwoBit | EightBit) else LENGTH
    start = 700 // block * block
    told = torch.zeros(LENGTH, dtype=torch.bool)
    told[start : start + block] = True
    assert bool((buffer[told] == torch.inf).all())
    assert bool(torch.isfinite(buffer[~told]).all())
    offsets = {s.name: s.offset for s in consecutive_segments(SHAPES)}
    for now, (piece, values) in zip(reduction.residuals(), before, strict=True):
        assert bool(torch.isfinite(now.values).all())
        if piece.kind == "factor":
            assert torch.equal(now.values, values)
            continue
        kept = told[offsets[piece.name] + piece.begin :][: values.numel()]
        assert torch.equal(now.values[kept], values[kept])
    reduction.undo()
    for now, (_, values) in zip(reduction.residuals(), before, strict=True):
        assert torch.equal(now.values, values)


@pytest.mark.parametrize("options", [OneBit(block=64), EightBit(block=64), TwoBit(block=64)])
@pytest.mark.ranks(2)
def test_b137_zeros_single_elements_odd_lengths_and_strides(options: Compression) -> None:
    for length in (0, 1, 2 * 64 * 2 + 1):
        zeros_and_strides(options, axes()[0], length)


def zeros_and_strides(options: Compression, axis: Axis, length: int) -> None:
    segments = [Segment("flat", 0, length)]
    zeros = CompressedReduction(options, axis, segments).reduce(torch.zeros(length))
    assert zeros.tolist() == [0.0] * length
    wide = torch.zeros(length, 3)
    wide[:, 1] = torch.arange(1.0, length + 1) * (1 + axis.rank)  # the mean over the two is 1.5, 3, 4.5, ...
    CompressedReduction(options, axis, segments).reduce(wide[:, 1])
    assert wide.shape == (length, 3)
    assert not wide[:, ::2].any()
    right = 1.5 * torch.arange(1.0, length + 1)
    assert bool((wide[:, 1] > 0).all())
    if length == 1:
        torch.testing.assert_close(wide[:, 1], right, rtol=2**-7, atol=0)  # two scales, each rounded
    block = Grid.of(length, 2, 64).block
    for got, exact in zip(wide[:, 1].split(max(1, block)), right.split(max(1, block)), strict=True):
        if isinstance(options, EightBit) and length:
            # Half a step of the worker's scale and half a step of the owner's.
            assert (got - exact).abs().max() <= exact.abs().max() / 127 * (1 + 1e-5)


@pytest.mark.parametrize("options", [*KINDS, TopK(density=0.05, momentum=0.9), TwoBit(momentum=0.9)])
@pytest.mark.ranks(2)
def test_a_step_that_is_taken_back_leaves_no_trace(options: Compression) -> None:
    for undoable in (True, False):
        skipped_steps(options, axes()[0], undoable)


def skipped_steps(options: Compression, axis: Axis, undoable: bool) -> None:
    segments = consecutive_segments(SHAPES)
    straight, skipping = (CompressedReduction(options, axis, segments, undoable=undoable) for _ in range(2))
    for step in range(4):
        for micro_batch in range(step if undoable else 0):  # none, one, several reductions in the step
            skipping.reduce(gradient(axis.rank, 50 + 10 * step + micro_batch, dtype=torch.float32))
        if undoable:
            skipping.undo()
            skipping.undo()
        one, other = (gradient(axis.rank, step, dtype=torch.float32) for _ in range(2))
        assert torch.equal(straight.reduce(one), skipping.reduce(other))
        straight.step()
        skipping.settle()
    for piece, same in zip(straight.residuals(), skipping.residuals(), strict=True):
        assert torch.equal(piece.values, same.values)
    if not undoable:
        with pytest.raises(RuntimeError, match="build it with undoable=True"):
            skipping.undo()


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.ranks(2)
def test_a_new_loss_scale_scales_what_is_owed(options: Compression) -> None:
    """Powers of two: then everything is exact, and the scaled run is the unscaled one, scaled."""
    axis = axes()[0]
    plain, scaled = (CompressedReduction(options, axis, consecutive_segments(SHAPES)) for _ in range(2))
    scale = 1.0
    for step in range(5):
        one = gradient(axis.rank, step, dtype=torch.float32)
        other = one * scale
        plain.reduce(one)
        scaled.reduce(other)
        torch.testing.assert_close(other / scale, one, rtol=1e-5, atol=1e-6)
        plain.step()
        scaled.rescale(4.0)
        scale *= 4
        if step % 2:
            scaled.undo()  # and the step is taken once more, on the new scale
            scaled.reduce(gradient(axis.rank, step, dtype=torch.float32) * scale)
        scaled.step()


@pytest.mark.ranks(2)
def test_a_buffer_that_does_not_fit_is_refused() -> None:
    axis = axes()[0]
    reduction = CompressedReduction(OneBit(), axis, [Segment("flat", 0, 10)])
    for buffer, words in (
        (torch.zeros(11), "flat, of the 10 elements"),
        (torch.zeros(2, 5), "flat"),
        (torch.zeros(10, dtype=torch.float64), "dtype=torch.float64"),
        (torch.zeros(10, dtype=torch.int32), "dtype=torch.int32"),
    ):
        with pytest.raises(ValueError, match=words):
            reduction.reduce(buffer)
    with pytest.raises(ValueError, match="'max' is not mean or sum"):
        reduction.reduce(torch.zeros(10), "max")
    with pytest.raises(ValueError, match=r"not of gradients"):
        CompressedReduction(OneBit(), axis, [], dtype=torch.int32)
    with pytest.raises(ValueError, match="is not one of OneBit"):
        CompressedReduction(Compression(), axis, [])


def sent_by(kinds: list[Compression], shapes: dict[str, tuple[int, ...]]) -> list[int]:
    """Bytes that this rank sent to reduce one buffer, for each kind."""
    axis = axes()[0]
    segments = consecutive_segments(shapes)
    sent = []
    for options in kinds:
        before = axis.ledger.total("dp").sent
        CompressedReduction(options, axis, segments).reduce(
            gradient(axis.rank, 0, segments[-1].end, torch.float32)
        )
        sent.append(axis.ledger.total("dp").sent - before)
    return sent


def test_bytes_on_the_wire() -> None:
    """By the ledger; an uncompressed all-reduce of n float32 sends 4 n from each of two workers."""
    n = 1 << 20
    shapes = {"a": (512, 1024), "b": (512, 1024)}
    kinds: list[Compression] = [OneBit(), TwoBit(), EightBit(), TopK(density=0.001), PowerSGD(rank=4)]
    records = n // 256
    of_two = [
        records * (2 + 32),
        records * (4 + 64),
        records * (2 + 256),
        4 * 16 + 6 * 1049,  # 16 chunks of 65536 elements, and 0.1% of the elements
        4 * 2 * (512 + 1024) * 4,  # (rows + columns) rank numbers for each matrix
    ]
    assert run_ranks(sent_by, 2, kinds, shapes) == [of_two] * 2
    for sent, share in zip(of_two, (1 / 28, 1 / 14, 1 / 3.8, 1 / 200, 0.01172 * 1.05), strict=True):
        assert sent * 1.03 <= 4 * n * share  # 3% for headers
    # Four workers: each sends 3/4 of its records twice, as a ring all-reduce does, or its elements to three.
    four = run_ranks(sent_by, 4, kinds[:4], shapes)
    assert four == [[3 * records // 4 * 2 * (2 + 32), 3 * records // 4 * 2 * (4 + 64), *four[0][2:]]] * 4
    assert four[0][3] == 3 * (4 * 16 + 6 * 1049)
