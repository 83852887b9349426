"""`shardweave checkpoint list/verify/show`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardweave.comm import Axis, Mesh, name_parameters
from shardweave.launcher.checkpoint import save
from shardweave.launcher.looking import list_checkpoints, show_checkpoint, verify_checkpoints
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Trainer
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import save_checkpoint

SETTINGS = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.sequence=8", "batch.global=2"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, and one that was never finished."""
    run = tmp_path_factory.mktemp("looking") / "run"
    trainer = Trainer(load_config(None, SETTINGS), Mesh())
    for _ in range(2):
        trainer.train_step()
        save(trainer, run / "checkpoints", keep=0)
    (run / "config.yaml").touch()
    (run / "checkpoints" / ".step-00000003.partial").mkdir()
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_list_has_a_line_for_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_checkpoints(run, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "saved", "layout", "size", "state", "directory"]
    assert [line.split()[-2] for line in lines[1:]] == ["whole", "whole", "unfinished"]
    assert lines[1].endswith("checkpoints/step-00000001")
    assert list_checkpoints(run / "checkpoints", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["whole"]) for one in found] == [(1, True), (2, True), (None, False)]
    file = run / "checkpoints" / "step-00000001" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    (run / "checkpoints" / "step-00000009").symlink_to(run / "gone")
    (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "step-00000007")
    assert list_checkpoints(run, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["whole"] for one in found] == [False] * 4
    assert "has 100 bytes and should have" in found[0]["problem"]
    assert "is of step 2, not of the one that it is named after" in found[2]["problem"]
    assert list_checkpoints(run, as_json=False) == 0


def test_a_checkpoint_of_somebodys_own_loop_is_as_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = torch.nn.Linear(3, 2)
    name_parameters(module)
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    save_checkpoint(tmp_path / "step-00000004", optimizer, world=Axis.single(), values={"mine": 1})
    assert list_checkpoints(tmp_path, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "4"
    assert verify_checkpoints(tmp_path, as_json=False) == 0
    assert show_checkpoint(tmp_path, tensors=False, as_json=False) == 0
    said = capsys.readouterr().out
    assert "8 in 2 tensors, float32" in said
    assert "mine" in said


def test_verify_names_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_checkpoints(run, as_json=False) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["whole", "whole"]
    path = run / "checkpoints" / "step-00000002"
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    assert verify_checkpoints(run, as_json=False) == 1
    said = capsys.readouterr()
    assert f"{path}: damaged" in said.out
    assert f"{file} is damaged" in said.err
    assert verify_checkpoints(path, as_json=True) == 1
    assert "checksum" in json.loads(capsys.readouterr().out)["checkpoints"][str(path)][0]
    (path / "complete").write_bytes(b"\xff\xfe")
    assert verify_checkpoints(run, as_json=False) == 1
    assert "index.json is damaged, or" in capsys.readouterr().err


def test_show_says_what_is_in_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_checkpoint(run, tensors=True, as_json=False) == 0
    said = capsys.readouterr().out
    assert "2, 4 samples taken" in said
    assert "AdamW: exp_avg, exp_avg_sq, step" in said
    assert any(line.split() == ["norm.weight", "16", "float32"] for line in said.splitlines())
    assert show_checkpoint(run / "checkpoints" / "step-00000001", tensors=False, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 1
    assert found["tensors"]["norm.weight"] == {"shape": [16], "dtype": "float32"}


def test_what_is_no_run_is_said_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_checkpoints(tmp_path / "gone", as_json=False) == 2
    assert verify_checkpoints(tmp_path / "gone", as_json=False) == 2
    assert show_checkpoint(tmp_path / "gone", tensors=False, as_json=False) == 2
    assert capsys.readouterr().err.count("error: ") == 3
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints").mkdir()
    assert list_checkpoints(tmp_path, as_json=False) == 0
    assert "has no checkpoint yet" in capsys.readouterr().out
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    assert list_checkpoints(tmp_path, as_json=False) == 2
    assert "unmounted, which is not there" in capsys.readouterr().err
