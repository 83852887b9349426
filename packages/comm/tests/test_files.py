"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardweave.comm.files import write_atomically


def test_a_file_is_made_with_its_directories_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "text"
    for text in ("old", "nëw"):
        write_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(path.parent) == ["text"]


@pytest.mark.parametrize("text", ["new", "cannot be encoded: \ud800"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text"
    if text == "new":
        path.mkdir()  # cannot be replaced by a file
    else:
        path.write_text("old")
    with pytest.raises((OSError, UnicodeEncodeError)):
        write_atomically(path, text)
    assert path.is_dir() or path.read_text() == "old"
    assert os.listdir(tmp_path) == ["text"]
