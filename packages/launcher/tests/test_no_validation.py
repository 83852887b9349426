"""A source that is never evaluated, though validation was asked for, is told before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.launcher.prepare import prepare
from shardweave.launcher.request import Request


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name, last in (("even", 100), ("long", 1000)):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number:02}.txt").write_text("a" * (100 if number < 29 else last))
    return tmp_path


def _warnings(source: str, *overrides: str) -> tuple[str, ...]:
    request = Request(None, (f"data.source={source}", "model.sequence=16", "run.dir=/nowhere", *overrides))
    return prepare(request).warnings


def test_a_last_document_that_is_too_long_is_told_with_the_share_that_holds_it(texts: Path) -> None:
    [warning] = _warnings(f"{texts}/long")
    assert "long: its last documents within `data.validation: 0.05` hold less than one sample" in warning
    assert "data.validation=0.2548 holds the first" in warning  # 1001 of 29 * 101 + 1001 tokens
    assert not _warnings(f"{texts}/long", "data.validation=0.2548")
    assert not _warnings(f"{texts}/long", "data.validation=0")
    assert not _warnings(f"{texts}/long", f"data.validation_source={texts}/even")


def test_one_source_of_a_blend_without_validation_is_told(texts: Path) -> None:
    blend = ", ".join(f"{{source: {texts}/{name}, weight: 1}}" for name in ("even", "long"))
    [warning] = _warnings(f"[{blend}]")
    assert warning.startswith(f"no validation on {texts}/long: ")
