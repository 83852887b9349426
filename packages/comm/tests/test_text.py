"""Words that messages, tables and keys share."""

from __future__ import annotations

import pytest
import torch

from shardweave.comm.text import bytes_text, dtype_name, ranks_text


def test_many_ranks_are_not_all_listed() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(3)) == "ranks 0, 1, 2"
    assert ranks_text(range(64)).endswith(" 14, 15, ... (64)")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536.0, "1.5 KiB"),
        (9.55 * 2**20, "9.55 MiB"),
        (1000 * 2**30, "1000 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_have_four_digits_at_most_and_a_unit(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_dtypes_have_short_names() -> None:
    assert [dtype_name(dtype) for dtype in (torch.bfloat16, torch.float, torch.uint8)] == [
        "bfloat16",
        "float32",
        "uint8",
    ]
