"""Checkpoints as files: what counts as whole, what is kept, and that damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardweave.launcher import checkpoint_files as files
from shardweave.launcher.checkpoint_files import CheckpointError, Index


def _make(root: Path, step: int, content: bytes = b"weights") -> Path:
    partial = files.partial_path(root, step)
    partial.mkdir(parents=True)
    (partial / files.rank_file(0)).write_bytes(content)
    entry = files.describe_file(partial / files.rank_file(0))
    index = Index(
        step=step,
        layout={"dp": 1},
        model={},
        training={},
        data={"samples": 3},
        versions={},
        files={files.rank_file(0): entry},
    )
    return files.commit(root, index)


def test_a_checkpoint_is_whole_when_its_marker_is_there(tmp_path: Path) -> None:
    path = _make(tmp_path, 20)
    assert path.name == "step-00000020"
    assert files.complete_checkpoints(tmp_path) == [(20, path)]
    index = files.read_index(path)
    assert (index.step, index.data) == (20, {"samples": 3})
    assert files.check_file(path, index, files.rank_file(0)).read_bytes() == b"weights"
    (path / "complete").unlink()
    assert files.complete_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        files.read_index(path)


def test_no_directory_and_strange_names_are_no_checkpoints(tmp_path: Path) -> None:
    assert files.complete_checkpoints(tmp_path / "none") == []
    for name in ("step-x", "step-1", "other", ".step-00000003.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete").touch()
    assert files.complete_checkpoints(tmp_path) == []


def test_damage_is_found(tmp_path: Path) -> None:
    path = _make(tmp_path, 1)
    index = files.read_index(path)
    file = path / files.rank_file(0)
    file.write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match="is damaged"):
        files.check_file(path, index, files.rank_file(0))
    file.write_bytes(b"weight")
    with pytest.raises(CheckpointError, match="has 6 bytes and should have 7"):
        files.check_file(path, index, files.rank_file(0))
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        files.check_file(path, index, files.rank_file(0))
    with pytest.raises(CheckpointError, match="has no file rank-00001"):
        files.check_file(path, index, files.rank_file(1))
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        files.read_index(path)


def test_a_later_format_is_named(tmp_path: Path) -> None:
    path = _make(tmp_path, 1)
    raw = json.loads((path / "index.json").read_text()) | {"format": 9}
    (path / "index.json").write_text(json.dumps(raw))
    from hashlib import sha256

    (path / "complete").write_text(sha256((path / "index.json").read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="has format 9, and this version reads 1"):
        files.read_index(path)


def test_the_newest_are_kept_in_numeric_order_and_remains_are_removed(tmp_path: Path) -> None:
    for step in (99999980, 100000000, 20, 3):
        _make(tmp_path, step)
    (tmp_path / ".step-00000040.partial").mkdir()
    (tmp_path / "step-00000050").mkdir()  # its marker was never written
    (tmp_path / ".step-100000001.partial").mkdir()  # perhaps being written now
    (tmp_path / "notes").mkdir()
    files.prune(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".step-100000001.partial", "notes", "step-100000000", "step-99999980"]
    files.prune(tmp_path, 0)
    assert [step for step, _ in files.complete_checkpoints(tmp_path)] == [100000000]


def test_a_step_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    _make(tmp_path, 5, b"old")
    path = _make(tmp_path, 5, b"new")
    assert files.check_file(path, files.read_index(path), files.rank_file(0)).read_bytes() == b"new"
