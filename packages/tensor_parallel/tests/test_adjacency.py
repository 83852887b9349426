"""Separate parameters in one piece of memory."""

from __future__ import annotations

import torch
from packages.tensor_parallel.tests.reference import values
from torch import nn

from shardweave.tensor_parallel.adjacency import joined, place_adjacent


def parameters(*rows: int) -> list[nn.Parameter]:
    return [nn.Parameter(values(count, 3, seed=count)) for count in rows]


def test_placing_keeps_objects_and_values() -> None:
    placed = parameters(2, 0, 4)
    before = [parameter.detach().clone() for parameter in placed]
    assert joined(placed) is None
    place_adjacent(placed)
    together = joined(placed)
    assert together is not None
    assert torch.equal(together, torch.cat(before))
    with torch.no_grad():
        placed[2][0, 0] = 7.0
    assert together[2, 0] == 7.0  # the same memory


def test_what_moved_is_noticed() -> None:
    placed = parameters(2, 4)
    place_adjacent(placed)
    placed[1].data = placed[1].detach().clone()
    assert joined(placed) is None
    flat = torch.zeros(40, dtype=torch.float64)
    placed[0].data, placed[1].data = flat[5:11].view(2, 3), flat[11:23].view(4, 3)
    assert joined(placed) is not None
    placed[1].data = flat[12:24].view(4, 3)  # with a gap
    assert joined(placed) is None
    placed[0].data, placed[1].data = flat[17:23].view(2, 3), flat[5:17].view(4, 3)  # in the other order
    assert joined(placed) is None


def test_neighbours_by_chance_are_not_joined() -> None:
    memory = torch.zeros(12, dtype=torch.float64).numpy()
    first, second = (torch.from_numpy(memory[part]).view(2, 3) for part in (slice(6), slice(6, 12)))
    assert second.data_ptr() == first.data_ptr() + 6 * 8
    assert joined([first, second]) is None


def test_single_rows_may_have_any_stride() -> None:
    flat = values(9)
    first = flat.as_strided((1, 3), (100, 1))
    assert first.is_contiguous()
    together = joined([first, flat[3:9].view(2, 3)])
    assert together is not None
    assert torch.equal(together, flat.view(3, 3))


def test_parts_without_rows() -> None:
    empty = [nn.Parameter(torch.empty(0, 3)) for _ in range(2)]
    place_adjacent(empty)
    together = joined(empty)
    assert together is not None
    assert together.shape == (0, 3)


def test_different_kinds_are_not_joined() -> None:
    flat = torch.zeros(24)
    assert joined([flat[:6].view(2, 3), flat[6:12].view(torch.int32).view(2, 3)]) is None
    assert joined([flat[:4].view(2, 2).t(), flat[4:8].view(2, 2)]) is None
    meta = [nn.Parameter(torch.empty(2, 3, device="meta")) for _ in range(2)]
    place_adjacent(meta)
    assert joined(meta) is None
    assert joined(meta[:1]) is meta[0]
