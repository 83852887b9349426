"""Saving and resuming by several ranks: the continuation is the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardweave.comm import Mesh, barrier
from shardweave.launcher import checkpoint
from shardweave.launcher import checkpoint_files as files
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.config import Config
from shardweave.launcher.dataset import Dataset
from shardweave.launcher.layout import Layout
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.resumable import find_resumable
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.weights import full_parameters

SETTINGS = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.sequence=8",
    "batch.global=8",
    "batch.micro=1",
    "run.steps=8",
    "zero.stage=1",
]


def _config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def _dataset() -> Dataset:
    tokens = np.random.default_rng(5).integers(1, 256, 8 * 40 + 1).astype(np.uint8)
    return Dataset(tokens, 8, 40, 0, "fingerprint")


def _quiet(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.ranks(4, timeout=120)
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(tmp_path: Path) -> None:
    for sizes, overrides in (
        ({"dp": 2, "tp": 2}, ["precision=bf16", "zero.stage=2"]),
        ({"dp": 2, "pp": 2}, ["model.dropout=0.1"]),
        ({"dp": 4}, ["zero.stage=0", "precision=fp64", "optimizer.name=sgd"]),
    ):
        mesh, config = Mesh(**sizes), _config(*overrides)
        root = tmp_path / "-".join(sizes)
        whole = Trainer(config, mesh, dataset=_dataset())
        expected = [whole.train_step().loss for _ in range(3)]
        path = save(whole, root, keep=2)
        barrier(mesh.world)
        for name, values in full_parameters(path).items():
            torch.testing.assert_close(
                whole.full_parameters()[name], values, check_dtype=False, rtol=0, atol=0.01
            )
        expected = [whole.train_step().loss for _ in range(3)]
        again = Trainer(config, mesh, dataset=_dataset())
        assert resume(again, root, _quiet) == path
        assert (again.step, again.samples) == (3, 24)
        assert [again.train_step().loss for _ in range(3)] == expected
        for name, values in whole.full_parameters().items():
            assert torch.equal(again.full_parameters()[name], values), name
        mesh.close()


@pytest.mark.ranks(4, timeout=120)
def test_weights_put_together_are_those_of_the_ranks(tmp_path: Path) -> None:
    for number, sizes in enumerate(({"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2})):
        mesh = Mesh(**sizes)
        trainer = Trainer(_config("model.vocab=257", "model.ffn=33"), mesh, dataset=_dataset())
        trainer.train_step()
        path = save(trainer, tmp_path / str(number), keep=1)
        barrier(mesh.world)
        expected, found = trainer.full_parameters(), full_parameters(path)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(found[name], values), name
        mesh.close()


@pytest.mark.ranks(2, timeout=120)
def test_all_ranks_fall_back_together_when_one_file_is_damaged(tmp_path: Path) -> None:
    mesh = Mesh(dp=2)
    trainer = Trainer(_config(), mesh, dataset=_dataset())
    paths = []
    for _ in range(3):
        trainer.train_step()
        paths.append(save(trainer, tmp_path, keep=2))
    barrier(mesh.world)
    assert [step for step, _ in files.complete_checkpoints(tmp_path)] == [2, 3]
    barrier(mesh.world)
    if mesh.world.rank == 1:  # one byte of one rank's file
        file = paths[2] / files.rank_file(1)
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    barrier(mesh.world)
    again = Trainer(_config(), mesh, dataset=_dataset())
    said: list[str] = []
    assert resume(again, tmp_path, said.append) == paths[1]
    assert again.step == 2
    if mesh.world.rank == 1:
        assert "is damaged" in said[0]
    barrier(mesh.world)
    again.train_step()
    assert save(again, tmp_path, keep=2) == paths[2]  # written anew
    barrier(mesh.world)
    files.check_file(paths[2], files.read_index(paths[2]), files.rank_file(1))


def _saved(tmp_path: Path, *overrides: str) -> Path:
    trainer = Trainer(_config(*overrides), Mesh(), dataset=_dataset())
    trainer.train_step()
    return save(trainer, tmp_path, keep=2)


def test_another_layout_model_or_precision_is_refused_by_name(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    assert find_resumable(_config(), tmp_path, Layout())[0].path == path
    for config, layout, text in (
        (
            _config(),
            Layout(tensor=2),
            r"was saved on dp1 × tp1 × pp1 and this run is dp1 × tp2 × pp1: loading on",
        ),
        (_config("model.hidden=32"), Layout(), r"another model: `model.hidden: 32` \(there: 16\)"),
        (_config("precision=fp64"), Layout(), r"other settings: `precision: fp64` \(there: fp32\)"),
    ):
        with pytest.raises(ConfigError, match=text):
            find_resumable(config, tmp_path, layout)
    assert find_resumable(_config("checkpoint.resume=never"), tmp_path, Layout(tensor=2)) == []


def test_a_path_names_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    path = _saved(tmp_path / "run" / "checkpoints")
    elsewhere = tmp_path / "other"
    for given in (path, tmp_path / "run"):
        trainer = Trainer(_config(f"checkpoint.resume={given}"), Mesh(), dataset=_dataset())
        assert resume(trainer, elsewhere, _quiet) == path
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        find_resumable(_config(f"checkpoint.resume={tmp_path}/gone"), elsewhere, Layout())
    (path / "complete").unlink()
    with pytest.raises(ConfigError, match="is not a whole checkpoint"):
        find_resumable(_config(f"checkpoint.resume={path}"), elsewhere, Layout())
    with pytest.raises(ConfigError, match="has no whole checkpoint"):
        find_resumable(_config(f"checkpoint.resume={tmp_path}/run"), elsewhere, Layout())


def test_a_new_run_has_nothing_to_resume(tmp_path: Path) -> None:
    assert resume(Trainer(_config(), Mesh(), dataset=_dataset()), tmp_path, _quiet) is None


def test_other_data_is_allowed_and_said(tmp_path: Path) -> None:
    _saved(tmp_path)
    said: list[str] = []
    other = Dataset(_dataset().tokens, 8, 40, 0, "another text")
    resume(Trainer(_config("run.seed=9"), Mesh(), dataset=other), tmp_path, said.append)
    assert said == [
        "warning: `run.seed` has changed since: samples come in another order from here on",
        "warning: the text of `data.source` has changed since the checkpoint",
    ]


def test_another_global_batch_continues_at_the_next_sample(tmp_path: Path) -> None:
    _saved(tmp_path)
    trainer = Trainer(_config("batch.global=4"), Mesh(), dataset=_dataset())
    resume(trainer, tmp_path, _quiet)
    assert trainer.samples == 8
    first = [int(batch.samples[0]) for batch in trainer.batches.at(trainer.samples)]
    whole = Trainer(_config(), Mesh(), dataset=_dataset())
    assert first == [int(batch.samples[0]) for batch in whole.batches.at(8)][:4]


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_spoils_nothing(tmp_path: Path) -> None:
    mesh = Mesh(dp=2)
    trainer = Trainer(_config(), mesh, dataset=_dataset())
    trainer.train_step()
    path = save(trainer, tmp_path, keep=2)
    trainer.train_step()
    barrier(mesh.world)
    if mesh.world.rank == 1:

        def refuse(trainer: Trainer, path: Path) -> files.FileEntry:
            path.mkdir()  # where the file would be: a directory, which no user can write to
            return write(trainer, path)

        write = checkpoint._write
        checkpoint._write = refuse
    with pytest.raises(OSError, match=r"rank|directory"):
        save(trainer, tmp_path, keep=2)
    assert files.complete_checkpoints(tmp_path) == [(1, path)]
