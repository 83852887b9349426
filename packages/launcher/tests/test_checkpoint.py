"""Saving and resuming by several ranks: the continuation is the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardweave.comm import Mesh, barrier
from shardweave.launcher.checkpoint import Saves, resume, save
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.resumable import find_resumable
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.words import tokenizer_of
from shardweave.zero.checkpoint import (
    CheckpointWriteError,
    complete_checkpoints,
    damaged_files,
    load_checkpoint,
    read_manifest,
    read_tensors,
    storage,
)

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
    return Dataset.of_tokens(tokens, 8)


def _quiet(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.ranks(4, timeout=120)
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(tmp_path: Path) -> None:
    for sizes, overrides in (
        ({"dp": 2, "tp": 2}, ["precision=bf16", "zero.stage=2"]),
        ({"dp": 2, "pp": 2}, ["model.dropout=0.1"]),
        ({"dp": 2, "cp": 1, "pp": 2}, ["precision=bf16", "zero.stage=3", "zero.keep_gathered=1000"]),
        ({"dp": 4}, ["zero.stage=0", "precision=fp64", "optimizer.name=sgd"]),
    ):
        mesh, config = Mesh.of(sizes), _config("batch.micro=2", *overrides)
        root = tmp_path / "-".join(sizes)
        whole = Trainer(config, mesh, dataset=_dataset())
        expected = [whole.train_step().loss for _ in range(2)]
        path = save(whole, root, keep=2)
        barrier(mesh.world)
        assert read_manifest(path).values["data"]["tokenizer"] == tokenizer_of(config).fingerprint
        full = whole.full_parameters()
        for name, values in read_tensors(path).items():
            torch.testing.assert_close(full[name], values, check_dtype=False, rtol=0, atol=0.01)
        expected = [whole.train_step().loss for _ in range(2)]
        again = Trainer(config, mesh, dataset=_dataset())
        assert resume(again, root, _quiet) == path
        assert (again.step, again.samples) == (2, 16)
        assert [again.train_step().loss for _ in range(2)] == expected
        full, found = whole.full_parameters(), again.full_parameters()
        assert found.keys() == full.keys()
        for name, values in full.items():
            assert torch.equal(found[name], values), name
        mesh.close()


@pytest.mark.ranks(4, timeout=120)
def test_experts_go_on_spread_over_any_ranks(tmp_path: Path) -> None:
    """With the biases of their routers, which are no parameters, on stages that have other layers."""
    experts = ("model.experts=4", "model.ffn=12", "model.router_bias=0.01", "precision=fp64")
    reference = Trainer(_config(*experts), Mesh.single(), dataset=_dataset())
    losses = [reference.train_step().loss for _ in range(4)]
    after: Path | None = None
    for number, (sizes, stage) in enumerate(
        (
            ({"dp": 4, "ep": 4}, 3),
            ({"dp": 2, "ep": 2, "pp": 2}, 1),
            ({"dp": 4, "ep": 2}, 2),
            ({"tp": 2, "pp": 2}, 0),
        )
    ):
        mesh = Mesh.of(sizes)
        trainer = Trainer(_config(*experts, f"zero.stage={stage}"), mesh, dataset=_dataset())
        assert resume(trainer, tmp_path, _quiet) == after
        assert trainer.train_step().loss == pytest.approx(losses[number], rel=1e-12)
        after = save(trainer, tmp_path, keep=0)
        barrier(mesh.world)
        mesh.close()
    last = Trainer(_config(*experts), Mesh.single(), dataset=_dataset())
    assert after is not None
    load_checkpoint(after, last.parts.optimizer, world=last.mesh.world, tensors=last.parts.buffers())
    for name, bias in last.parts.buffers().items():
        assert torch.equal(bias, reference.parts.modules[0].get_buffer(name)), name
        assert bias.abs().max() > 0


@pytest.mark.ranks(4, timeout=120)
def test_weights_put_together_are_those_of_the_ranks(tmp_path: Path) -> None:
    for number, sizes in enumerate(({"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2})):
        mesh = Mesh.of(sizes)
        trainer = Trainer(_config("model.vocab=257", "model.ffn=33"), mesh, dataset=_dataset())
        trainer.train_step()
        path = save(trainer, tmp_path / str(number), keep=1)
        barrier(mesh.world)
        expected, found = trainer.full_parameters(), read_tensors(path)
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
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2, 3]
    barrier(mesh.world)
    if mesh.world.rank == 1:  # one byte of one rank's file
        flip(paths[2] / "rank-00001.safetensors", -5)
    barrier(mesh.world)
    again = Trainer(_config(), mesh, dataset=_dataset())
    said: list[str] = []
    assert resume(again, tmp_path, said.append) == paths[1]
    assert again.step == 2
    assert "step-00000003 is passed over: rank 1: " in said[0]
    assert "rank-00001.safetensors is damaged" in said[0]
    barrier(mesh.world)
    again.train_step()
    assert save(again, tmp_path, keep=2) == paths[2]  # written anew
    barrier(mesh.world)
    assert damaged_files(paths[2]) == []


def flip(file: Path, position: int) -> None:
    """One bit."""
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.ranks(2, timeout=120)
def test_checkpoints_that_cannot_be_read_never_start_a_run_from_the_beginning(tmp_path: Path) -> None:
    mesh = Mesh(dp=2)
    trainer = Trainer(_config(), mesh, dataset=_dataset())
    trainer.train_step()
    path = save(trainer, tmp_path, keep=2)
    barrier(mesh.world)
    if mesh.world.is_first:
        flip(path / "rank-00001.safetensors", -5)
    barrier(mesh.world)
    with pytest.raises(ConfigError, match=r"no checkpoint can be read: rank 1: .*checkpoint\.resume=never"):
        resume(Trainer(_config(), mesh, dataset=_dataset()), tmp_path, lambda text: None)
    barrier(mesh.world)
    if mesh.world.is_first:
        flip(path / "index.json", 5)
    barrier(mesh.world)
    with pytest.raises(ConfigError, match=r"no checkpoint can be read: .*index\.json is damaged"):
        resume(Trainer(_config(), mesh, dataset=_dataset()), tmp_path, _quiet)


def _saved(tmp_path: Path, *overrides: str) -> Path:
    trainer = Trainer(_config(*overrides), Mesh(), dataset=_dataset())
    trainer.train_step()
    return save(trainer, tmp_path, keep=2)


def test_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    found = find_resumable(_config(), tmp_path)
    assert (found.paths, found.step, found.passed, found.changes) == ((path,), 1, (), ())
    for override, text in (
        ("model.hidden=32", r"`model.hidden: 32` \(there: 16\)"),
        ("optimizer.name=sgd", r"`optimizer.name: sgd` \(there: adamw\)"),
        ("precision=fp64", r"`precision: fp64` \(there: fp32\)"),
    ):
        with pytest.raises(ConfigError, match=f"another model or optimizer: .*{text}"):
            find_resumable(_config(override), tmp_path)
    assert find_resumable(_config("checkpoint.resume=never"), tmp_path).paths == ()


def test_what_makes_it_another_run_is_told_and_what_does_not_is_not(tmp_path: Path) -> None:
    _saved(tmp_path)
    free = ["parallel.tensor=2", "zero.stage=2", "batch.micro=2", "comm.bucket_mb=1", "run.log_every=7"]
    assert find_resumable(_config(*free), tmp_path).changes == ()
    told = find_resumable(_config("optimizer.lr=0.5", "run.steps=9", "guard.spike=off"), tmp_path).changes
    assert told == (
        "changed since step-00000001: `run.steps: 9` (there: 8): the learning-rate schedule spans other steps",
        "changed since step-00000001: `optimizer.lr: 0.5` (there: 0.001)",
        "changed since step-00000001: `guard.spike: off` (there: warn)",
    )


def test_a_folder_of_checkpoints_that_cannot_be_read_never_starts_a_run_over(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.symlink_to(tmp_path / "unmounted")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.resume: .* is a link to .*unmounted, which is not there"
    ):
        resume(Trainer(_config(), Mesh(), dataset=_dataset()), root, _quiet)


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    trainer = Trainer(_config(), Mesh(), dataset=_dataset())
    monkeypatch.setattr("shardweave.zero.checkpoint.folder.shutil.rmtree", refuse)
    said: list[str] = []
    for _ in range(2):
        trainer.train_step()
        monkeypatch.setattr(
            "shardweave.zero.checkpoint.saving.shutil.rmtree",
            lambda path, ignore_errors=False: refuse(path) if not ignore_errors else None,
        )
        save(trainer, tmp_path, keep=1, warn=said.append)
    assert "an old checkpoint could not be deleted: [Errno 13] Permission denied" in said[0]


def test_unfinished_checkpoints_are_passed_over_and_said(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    (tmp_path / ".step-00000004.partial").mkdir()
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000000").mkdir()  # older: no news
    found = find_resumable(_config(), tmp_path)
    assert found.paths == (path,)
    assert [text.split()[0] for text in found.passed] == [
        str(tmp_path / ".step-00000004.partial"),
        str(tmp_path / "step-00000003"),
    ]


def test_a_path_names_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    path = _saved(tmp_path / "run" / "checkpoints")
    elsewhere = tmp_path / "other"
    for given in (path, tmp_path / "run"):
        trainer = Trainer(_config(f"checkpoint.resume={given}"), Mesh(), dataset=_dataset())
        assert resume(trainer, elsewhere, _quiet) == path
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        find_resumable(_config(f"checkpoint.resume={tmp_path}/gone"), elsewhere)
    (path / "complete").unlink()
    with pytest.raises(ConfigError, match="is not a whole checkpoint"):
        find_resumable(_config(f"checkpoint.resume={path}"), elsewhere)
    with pytest.raises(ConfigError, match="has no whole checkpoint"):
        find_resumable(_config(f"checkpoint.resume={tmp_path}/run"), elsewhere)


def test_a_new_run_has_nothing_to_resume(tmp_path: Path) -> None:
    assert resume(Trainer(_config(), Mesh(), dataset=_dataset()), tmp_path, _quiet) is None


def test_other_data_is_allowed_and_said(tmp_path: Path) -> None:
    _saved(tmp_path)
    said: list[str] = []
    other = Dataset.of_tokens(np.arange(8 * 40 + 1, dtype=np.uint8) % 100, 8)
    resume(Trainer(_config("run.seed=9"), Mesh(), dataset=other), tmp_path, said.append)
    assert said == [
        "warning: changed since step-00000001: `run.seed: 9` (there: 1234): samples come in another order from here on",
        "warning: the text of `data.source` has changed since the checkpoint",
    ]


def test_a_course_that_is_not_continued_is_set_aside(tmp_path: Path) -> None:
    trainer = Trainer(_config(), Mesh(), dataset=_dataset())
    paths = []
    for _ in range(3):
        trainer.train_step()
        paths.append(save(trainer, tmp_path, keep=0))
    said: list[str] = []
    again = Trainer(_config(f"checkpoint.resume={paths[0]}"), Mesh(), dataset=_dataset())
    assert resume(again, tmp_path, said.append) == paths[0]
    assert complete_checkpoints(tmp_path) == [(1, paths[0])]
    assert [text.split(" lies ")[0] for text in said] == ["warning: step-00000002", "warning: step-00000003"]
    again.train_step()
    save(again, tmp_path, keep=1)
    assert complete_checkpoints(tmp_path) == [(2, paths[1])]
    assert (tmp_path / "step-00000003.superseded" / "complete").is_file()


def test_another_global_batch_continues_at_the_next_sample(tmp_path: Path) -> None:
    _saved(tmp_path)
    trainer = Trainer(_config("batch.global=4"), Mesh(), dataset=_dataset())
    resume(trainer, tmp_path, lambda text: None)
    assert trainer.samples == 8
    first = [int(batch.samples[0]) for batch in trainer.batches.at(trainer.samples)]
    whole = Trainer(_config(), Mesh(), dataset=_dataset())
    assert first == [int(batch.samples[0]) for batch in whole.batches.at(8)][:4]


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2)
    trainer = Trainer(_config(), mesh, dataset=_dataset())
    trainer.train_step()
    path = save(trainer, tmp_path, keep=2)
    trainer.train_step()
    barrier(mesh.world)
    if mesh.world.rank == 1:

        def refuse(tensors: dict[str, torch.Tensor], file: Path) -> None:
            file.mkdir()  # where the file would be: a directory, which no user can write to
            write(tensors, file)

        write = storage.__dict__["write_chunks"]
        monkeypatch.setattr(storage, "write_chunks", refuse)
    with pytest.raises(CheckpointWriteError, match=r"step-00000002 could not be written: rank 1: "):
        save(trainer, tmp_path, keep=2)
    barrier(mesh.world)
    assert complete_checkpoints(tmp_path) == [(1, path)]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.ranks(2, timeout=60)
def test_saves_behind_the_training_fail_with_a_warning_and_two_in_a_row_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2)
    trainer = Trainer(_config(), mesh, dataset=_dataset())
    said: list[str] = []
    saves = Saves(mesh.world, tmp_path, keep=1, behind=True, warn=said.append)
    write = storage.__dict__["write_chunks"]

    def full(tensors: dict[str, torch.Tensor], file: Path) -> None:
        raise OSError(28, "No space left on device")

    for fails in (False, True, False, True, True):
        trainer.train_step()
        if trainer.step < 5:
            before = saves.settle()
            assert (before is not None) == (trainer.step == 3)
            assert before is None or "step-00000002 could not be written: ranks 0, 1: " in before
            monkeypatch.setattr(storage, "write_chunks", full if fails else write)
            saves.save(trainer)
            continue
        saves.settle()  # step 4's: the first failure after a success
        saves.save(trainer)
    with pytest.raises(CheckpointWriteError, match=r"step-00000005 could not be written"):
        saves.settle()
    barrier(mesh.world)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000003"]  # step 1's is pruned
    assert resume(trainer, tmp_path, _quiet) == tmp_path / "step-00000003"
    assert said == []


@pytest.mark.ranks(2, timeout=60)
def test_a_save_behind_the_training_that_cannot_begin_is_one_that_failed(tmp_path: Path) -> None:
    """A full disk may refuse the directory, before a file is written."""
    mesh = Mesh(dp=2)
    trainer = Trainer(_config(), mesh, dataset=_dataset())
    saves = Saves(mesh.world, tmp_path, keep=1, behind=True, warn=_quiet)
    for step in (1, 2, 3, 4):
        trainer.train_step()
        failed = saves.settle()
        assert (failed is not None) == (step == 2), failed
        if mesh.world.is_first and step != 2:
            (tmp_path / f".step-{step:08d}.partial").write_text("in the way")
        saves.save(trainer)
        assert saves.pending == tmp_path / f"step-{step:08d}"
        if step == 3:
            assert saves.settle() is not None  # the first after one that was written
    with pytest.raises(CheckpointWriteError, match=r"\.step-00000004\.partial cannot be made"):
        saves.settle()
    assert saves.pending is None
    saves.finish()
    assert [path for _, path in complete_checkpoints(tmp_path)] == [tmp_path / "step-00000002"]


def test_the_next_start_removes_what_a_dead_save_left(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    left = path.with_name(".step-00000090.partial")
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert resume(Trainer(_config(), Mesh(), dataset=_dataset()), path.parent, lambda _: None) == path
    assert not left.exists()


def test_a_checkpoint_whose_replacement_was_cut_off_is_found(tmp_path: Path) -> None:
    """Between the old one's move aside and the new one's marker, a writer that dies leaves none of that name."""
    trainer = Trainer(_config(), Mesh.single(), dataset=_dataset())
    trainer.train_step()
    path = save(trainer, tmp_path, keep=2)
    path.rename(tmp_path / f".{path.name}.replaced")
    path.mkdir()
    (path / "index.json").write_text("{}")
    again = Trainer(_config(), Mesh.single(), dataset=_dataset())
    assert resume(again, tmp_path, _quiet) == path
    assert again.step == 1
    assert list(tmp_path.iterdir()) == [path]
