"""Packed bits, and blocks as records of bytes, without any processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardweave.comm.compression.bits import byte_table, pack, sign_flags, unpack
from shardweave.comm.compression.blocks import BlockCodec, EightBitCodec, OneBitCodec, TwoBitCodec
from shardweave.comm.compression.grid import Grid

CPU = torch.device("cpu")
CODECS = [OneBitCodec, TwoBitCodec, EightBitCodec]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(codec: BlockCodec, values: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The records of ``values``, and what they decode to."""
    counts = torch.full((len(values), 1), float(values.shape[1])) if counts is None else counts
    records = torch.zeros(len(values), codec.record, dtype=torch.uint8)
    codec.encode(values, counts.to(values.dtype), records, values.new_empty((2, *values.shape)))
    decoded = torch.empty_like(values)
    codec.decode(records, decoded)
    return records, decoded


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64, 1001])
def test_flags_come_back_and_bit_i_of_byte_j_is_element_8j_plus_i(length: int) -> None:
    flags = (torch.arange(3 * length).view(3, length) * 2654435761 >> 7 & 1).to(torch.int8)
    packed = pack(flags)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, -(-length // 8))
    for row, bytes_ in zip(flags.tolist(), packed.tolist(), strict=True):
        assert bytes_ == [sum(bit << i for i, bit in enumerate(row[j : j + 8])) for j in range(0, length, 8)]
    assert torch.equal(unpack(packed, byte_table(0, 1), length), flags)
    assert torch.equal(unpack(packed, byte_table(1, -1), length), 1 - 2 * flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sign_flags_are_the_sign_bits(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, torch.inf, -torch.inf, 1e-40, -1e-40], dtype=dtype)
    before = values.clone()
    assert sign_flags(values).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert torch.equal(values, before)
    assert sign_flags(values, values).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [32, 96, 1024])
def test_one_bit_is_the_sign_times_the_mean_magnitude(block: int, dtype: torch.dtype) -> None:
    values = normal(5, block, dtype=dtype)
    records, decoded = through(OneBitCodec(block, CPU), values)
    assert records.shape == (5, 2 + block // 8)
    mean = torch.stack([row.abs().mean() for row in values]).to(torch.bfloat16).to(dtype)
    torch.testing.assert_close(decoded, values.sign() * mean.unsqueeze(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_bits_are_the_sign_times_the_mean_of_the_small_or_of_the_large(dtype: torch.dtype) -> None:
    values = normal(6, 64, dtype=dtype) ** 3
    values[4] = 2.5  # all equal: none larger than their root mean square, or all
    values[5, :] = 0
    values[5, 9] = -1e7  # one beside zeros
    records, decoded = through(TwoBitCodec(64, CPU), values)
    assert records.shape == (6, 4 + 64 // 4)
    for row, got in zip(values.double(), decoded.double(), strict=True):
        magnitude = row.abs()
        large = magnitude > row.square().mean().sqrt() * (1 + 1e-6)
        levels = torch.zeros(64, dtype=torch.float64)
        for part in (large, ~large):
            levels[part] = magnitude[part].mean().to(torch.bfloat16).double()
        torch.testing.assert_close(got, torch.where(row < 0, -levels, levels), rtol=2e-6, atol=1e-12)


def test_small_ones_beside_a_huge_one_keep_their_own_mean() -> None:
    """A difference of sums would have said 0 or 8 for them."""
    values = torch.full((1, 64), 1e-3)
    values[0, 7] = 1e8
    _, decoded = through(TwoBitCodec(64, CPU), values)
    assert decoded[0, 0].item() == pytest.approx(1e-3, rel=2**-9)
    assert decoded[0, 7].item() == pytest.approx(1e8, rel=2**-9)


def test_eight_bits_are_the_nearest_steps() -> None:
    values = normal(4, 96)
    records, decoded = through(EightBitCodec(96, CPU), values)
    assert records.shape == (4, 2 + 96)
    scale = (values.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16).float()
    assert bool(((values - decoded).abs() <= scale / 2 * (1 + 1e-5)).all())
    steps = decoded / scale
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_left_is_never_larger_than_what_was_there(codec: type[BlockCodec]) -> None:
    """A contraction: what proofs of error feedback ask for. Also for tails heavier than any gradient's."""
    for power in (1, 3, 9):
        values = normal(50, 128, seed=power, dtype=torch.float64) ** power
        _, decoded = through(codec(128, CPU), values)
        left = (values - decoded).square().sum(1)
        assert bool((left < values.square().sum(1)).all())


def test_errors_of_the_levels_are_as_documented() -> None:
    normals = normal(2000, 256)
    uniform = torch.rand(2000, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    laplace = (torch.log(2 * uniform.clamp(1e-12, 0.5)) - torch.log(2 * (1 - uniform.clamp(0.5, 1)))).float()
    for codec, values, documented in (
        (OneBitCodec, normals, 0.362),
        (OneBitCodec, laplace, 0.499),
        (TwoBitCodec, normals, 0.117),
        (TwoBitCodec, laplace, 0.175),
    ):
        _, decoded = through(codec(256, CPU), values)
        error = (values - decoded).square().sum() / values.square().sum()
        assert error.item() == pytest.approx(documented, abs=0.004)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_b137_zeros_stay_zero_and_what_is_not_finite_is_found(codec: type[BlockCodec], bad: float) -> None:
    coder = codec(64, CPU)
    values = normal(4, 64)
    values[1] = 0
    _, alone = through(coder, values)
    values[2, 63] = bad
    records, decoded = through(coder, values)
    assert coder.broken(records).tolist() == [[False], [False], [True], [False]]
    assert torch.equal(decoded[1], torch.zeros(64))
    assert torch.equal(decoded[[0, 1, 3]], alone[[0, 1, 3]])


@pytest.mark.parametrize("codec", CODECS)
def test_a_short_block_is_scaled_by_what_is_in_it(codec: type[BlockCodec]) -> None:
    values = torch.zeros(2, 64)
    values[0, 0] = -3.5  # a single element is its own scale
    values[1, :2] = torch.tensor([2.0, -2.0])
    _, decoded = through(codec(64, CPU), values, torch.tensor([[1.0], [2.0]]))
    torch.testing.assert_close(decoded[0, 0].item(), -3.5, rtol=2**-8, atol=0)
    torch.testing.assert_close(decoded[1, :2], torch.tensor([2.0, -2.0]), rtol=2**-8, atol=0)


def test_a_grid_covers_the_buffer_with_equal_parts_and_little_left_over() -> None:
    for workers in (2, 3, 4, 8):
        for length in (1, 7, 31, 32, 33, 1000, 5 * 1024, 2 * 1024 * workers + 1, 100_003):
            grid = Grid.of(length, workers, 1024)
            assert grid.block % 32 == 0
            assert grid.block <= 1024
            assert length <= grid.blocks * grid.block <= length + 32 * grid.blocks
            spans = [grid.span(block, block + 1) for block in range(grid.blocks)]
            covered = [i for span in spans for i in range(span.start, span.stop)]
            assert covered == list(range(length))
    assert Grid.of(0, 3, 1024).blocks == 0
    assert Grid.of(8 * 1024, 4, 1024) == Grid(8 * 1024, 1024, 2, 4)
