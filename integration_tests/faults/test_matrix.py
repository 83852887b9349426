"""Some pairs of the matrix of layouts; `nox -s faults` tries all 144."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_tests.faults.matrix import FEW, differences


@pytest.mark.timeout(240)
def test_b091_a_checkpoint_of_each_layout_is_bit_equal_in_each(tmp_path: Path) -> None:
    assert differences(tmp_path, FEW) == []
