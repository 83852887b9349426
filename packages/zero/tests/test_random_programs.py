"""Some of the random programs; `nox -s lattice` runs more (``python -m packages.zero.tests.random_programs``)."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest
from packages.zero.tests.nets import STAGES
from packages.zero.tests.random_programs.operations import OPERATIONS
from packages.zero.tests.random_programs.programs import program, run_programs
from packages.zero.tests.random_programs.settings import Setting

from shardweave.comm.testing import RankError, run_ranks
from shardweave.zero.member import Member
from shardweave.zero.residency import Residency

TWO = range(16)
FOUR = [seed for seed in range(40) if Setting.draw(Random(f"setting {seed}"), 4, None).copies][:4]


def test_programs_equal_plain_torch() -> None:
    results = run_ranks(run_programs, 2, TWO, 2, timeout=120)
    assert results[0] == results[1]
    refused = [text for text in results[0] if text]
    assert all("max_live_parameters=" in text for text in refused)
    assert len(refused) < len(TWO) / 4


def test_programs_with_shards_inside_of_two_copies() -> None:
    results = run_ranks(run_programs, 4, FOUR, 4, timeout=120)
    assert results == [results[0]] * 4
    assert len(results[0]) == 4
    assert "" in results[0]


def test_these_programs_have_every_operation_at_every_stage() -> None:
    """And a seed is the same program wherever it is drawn."""
    assert {operation for seed in TWO for operation in program(seed)} >= set(OPERATIONS)
    assert {Setting.draw(Random(f"setting {seed}"), 2, None).stage for seed in TWO} == set(STAGES)
    assert program(TWO[-1]) == program(TWO[-1])


def never_released() -> None:
    """Keeps all that was gathered."""
    with patch.object(Residency, "_free", lambda self, member: None):
        run_programs(TWO, 2, stage=3)


def writes_lost() -> None:
    """Forgets what was written into gathered parameters."""
    with patch.object(Member, "touch", lambda self: None):
        run_programs(TWO, 2, stage=3)


def test_a_fault_is_found_and_told() -> None:
    """The seed, what it ran with, the operation, and what is wrong."""
    where = r"seed \d+ \(stage 3, .*\), operation \d+, \w+: "
    with pytest.raises(RankError, match=rf"{where}after a .* parameters are gathered"):
        run_ranks(never_released, 2)
    with pytest.raises(RankError, match=rf"{where}.* (is|are) off by"):
        run_ranks(writes_lost, 2)
