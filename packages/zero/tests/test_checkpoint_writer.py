"""Checkpoints written behind the loop: each holds the moment of its save, and its errors are heard on all ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, barrier, gather_values, name_parameters
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import (
    CheckpointWriteError,
    CheckpointWriter,
    checkpoint_path,
    complete_checkpoints,
    damaged_files,
    folder,
    load_checkpoint,
    read_manifest,
    read_tensors,
    remove_partials,
    save_checkpoint,
    storage,
)


def build(world: Axis, stage: int) -> tuple[nn.Module, ZeroOptimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    name_parameters(net)
    optimizer = ZeroOptimizer(
        net.parameters(),
        torch.optim.Adam,
        data=world,
        stage=stage,
        module=net if stage == 3 else None,
        lr=0.1,
    )
    return net, optimizer


def train(net: nn.Module, optimizer: ZeroOptimizer, steps: range) -> None:
    for step in steps:
        net(torch.full((4, 5), 0.1 * step)).square().sum().backward()
        optimizer.step()


def everything(path: Path) -> dict[str, Tensor]:
    return read_tensors(path, sorted(read_manifest(path).tensors))


class Slow:
    """The writing of files, held up until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.at_once = self.most = 0
        write = storage.__dict__["write_chunks"]

        def slow(tensors: Any, file: Path) -> Any:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            assert self.go.wait(30)
            found = write(tensors, file)
            self.at_once -= 1
            return found

        monkeypatch.setattr(storage, "write_chunks", slow)


@pytest.mark.ranks(2, timeout=60)
def test_b100_a_slow_save_holds_its_own_step_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2)
    for stage in (0, 1, 3):
        root = tmp_path / f"stage{stage}"
        expected = []
        net, optimizer = build(mesh.data, stage)
        for first, last in ((0, 3), (3, 6)):
            train(net, optimizer, range(first, last))
            torch.manual_seed(last)
            path = checkpoint_path(root / "blocking", last)
            save_checkpoint(path, optimizer, world=mesh.world, values={"step": last})
            barrier(mesh.world)
            expected.append(everything(path))
        with monkeypatch.context() as patch:
            slow = Slow(patch)
            whole: list[Path] = []
            writer = CheckpointWriter(mesh.world, then=whole.append)
            net, optimizer = build(mesh.data, stage)
            train(net, optimizer, range(3))
            torch.manual_seed(3)
            values = {"step": 3}
            writer.save(checkpoint_path(root, 3), optimizer, values=values)
            values["step"] = 4  # the caller's own again
            train(net, optimizer, range(3, 6))
            assert complete_checkpoints(root) == []  # it is still being written
            assert writer.pending == checkpoint_path(root, 3)
            assert not writer.is_whole
            barrier(mesh.world)
            torch.manual_seed(6)
            slow.go.set()
            writer.save(checkpoint_path(root, 6), optimizer, values={"step": 6})
            assert checkpoint_path(root, 3) in [path for _, path in complete_checkpoints(root)]
            held = writer.host_bytes
            writer.finish()
            writer.finish()  # there is none
            assert writer.pending is None
            assert slow.most == 1
        barrier(mesh.world)
        assert [step for step, _ in complete_checkpoints(root)] == [3, 6]
        assert whole == ([checkpoint_path(root, 3), checkpoint_path(root, 6)] if mesh.world.is_first else [])
        found = [everything(checkpoint_path(root, step)) for step in (3, 6)]
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(values, other[name]) for name, values in one.items())
        assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])
        assert [read_manifest(checkpoint_path(root, step)).values["step"] for step in (3, 6)] == [3, 6]
        assert damaged_files(checkpoint_path(root, 6)) == []
        assert not list(root.rglob("*.written.json*"))
        # The copy is this rank's planned chunks: all ranks' together are the checkpoint, once.
        total = sum(values.numel() * values.element_size() for values in found[1].values())
        assert sum(gather_values(held, mesh.world)) == total
        load_checkpoint(checkpoint_path(root, 3), optimizer, world=mesh.world)


@pytest.mark.ranks(2, timeout=60)
def test_a_save_that_fails_behind_is_heard_by_all_ranks_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2)
    net, optimizer = build(mesh.data, 1)
    writer = CheckpointWriter(mesh.world)
    write = storage.__dict__["write_chunks"]
    for victim in (0, 1):

        def full(tensors: Any, file: Path, victim: int = victim) -> Any:
            if mesh.world.rank == victim:
                raise OSError(28, "No space left on device")
            return write(tensors, file)

        monkeypatch.setattr(storage, "write_chunks", full)
        writer.save(checkpoint_path(tmp_path, 1), optimizer)
        train(net, optimizer, range(1))  # nothing is heard of it before
        monkeypatch.setattr(storage, "write_chunks", write)
        with pytest.raises(
            CheckpointWriteError, match=rf"could not be written: rank {victim}: .*No space left"
        ):
            writer.save(checkpoint_path(tmp_path, 2), optimizer)
        barrier(mesh.world)
        assert list(tmp_path.iterdir()) == []  # the space is given back
        writer.save(checkpoint_path(tmp_path, 2), optimizer)
        writer.finish()
        barrier(mesh.world)
        assert [step for step, _ in complete_checkpoints(tmp_path)] == [2]
        barrier(mesh.world)
        if mesh.world.is_first:
            folder.delete_checkpoint(checkpoint_path(tmp_path, 2))
        barrier(mesh.world)
    if mesh.world.is_first:
        monkeypatch.setattr(
            folder, "_write_synced", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only"))
        )
    writer.save(checkpoint_path(tmp_path, 3), optimizer)
    with pytest.raises(CheckpointWriteError, match=r"rank 0: .*Read-only"):
        writer.finish()


def test_what_a_dead_save_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-00000004.partial", ".step-00000009.partial", "step-00000002", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000004.partial" / "rank-00000.safetensors").touch()
    (tmp_path / ".step-00000004.partial" / "rank-00000.written.json.new").touch()
    (tmp_path / ".step-00000009.partial" / "mine.txt").touch()
    assert remove_partials(tmp_path) == [tmp_path / ".step-00000004.partial"]
    assert {one.name for one in tmp_path.iterdir()} == {".step-00000009.partial", "step-00000002", "notes"}


def test_one_process_writes_behind_too(tmp_path: Path) -> None:
    _, optimizer = build(Axis.single(), 0)
    writer = CheckpointWriter(Axis.single())
    large = torch.arange(3_000_000, dtype=torch.float64)  # large enough for threads
    writer.save(
        tmp_path / "one", optimizer, tensors={"large": large, "bits": torch.ones(3, dtype=torch.bool)}
    )
    large.zero_()
    deadline = time.monotonic() + 20
    while not writer.is_whole:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.finish()
    assert damaged_files(tmp_path / "one") == []
    found = read_tensors(tmp_path / "one", ["extra/large", "extra/bits"])
    assert torch.equal(found["extra/large"], torch.arange(3_000_000, dtype=torch.float64))
    assert found["extra/bits"].tolist() == [True] * 3
