"""File systems that are full, read-only, gone or slow: told to all ranks by name, and the checkpoint before is whole.

The faults are those of the calls that every writer ends with, ``fsync`` and ``mkdir``: what they fail with is what a
file system says, whatever was written how.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardweave.comm import Mesh, barrier, name_parameters
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import (
    CheckpointError,
    CheckpointWriteError,
    checkpoint_path,
    complete_checkpoints,
    damaged_files,
    folder,
    save_checkpoint,
)


def trained(mesh: Mesh) -> ZeroOptimizer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    name_parameters(net)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.Adam, data=mesh.data, stage=3, module=net, lr=0.1)
    net(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    return optimizer


def failing(number: int, path: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), path)

    return fail


@contextlib.contextmanager
def full_at_commit(name: str) -> Iterator[None]:
    """The disk is full when the file of this name, of the first rank's last two, is written: it is there, in part."""
    write = folder.__dict__["_write_synced"]

    def half(file: Path, content: bytes) -> None:
        write(file, content[: len(content) // 2] if file.name == name else content)
        if file.name == name:
            failing(errno.ENOSPC, str(file))()

    with mock.patch.object(folder, "_write_synced", half):
        yield


@pytest.mark.ranks(2, timeout=60)
def test_a_fault_of_the_file_system_is_one_error_on_all_ranks_and_spoils_nothing(tmp_path: Path) -> None:
    mesh = Mesh(dp=2)
    optimizer, first = trained(mesh), checkpoint_path(tmp_path, 2)
    save_checkpoint(first, optimizer, world=mesh.world)
    barrier(mesh.world)
    lost = str(tmp_path / "lost")
    for rank, fault, words in (
        (0, mock.patch("os.mkdir", failing(errno.EROFS, lost)), "Read-only file system"),
        (0, mock.patch("os.mkdir", failing(errno.ENOSPC, lost)), "No space left on device"),
        (1, mock.patch("os.fsync", failing(errno.EROFS, lost)), "rank 1: .*Read-only file system"),
        (1, mock.patch("os.fsync", failing(errno.ENOSPC, lost)), "rank 1: .*No space left on device"),
        (1, mock.patch("os.fsync", failing(errno.ESTALE, lost)), "rank 1: .*Stale file handle"),
        (1, mock.patch("os.fsync", failing(errno.EIO, lost)), "rank 1: .*Input/output error"),
        (0, full_at_commit("index.json"), "rank 0: .*No space left on device"),
        (0, full_at_commit("complete"), "rank 0: .*No space left on device"),
    ):
        with (
            fault if mesh.world.rank == rank else contextlib.nullcontext(),
            pytest.raises(CheckpointWriteError, match=rf"step-00000004.*{words}"),
        ):
            save_checkpoint(checkpoint_path(tmp_path, 4), optimizer, world=mesh.world)
        barrier(mesh.world)
        whole = [path for _, path in complete_checkpoints(tmp_path) if _is_good(path)]
        assert whole == [first], words
        barrier(mesh.world)
    save_checkpoint(checkpoint_path(tmp_path, 4), optimizer, world=mesh.world)  # once there is room again
    barrier(mesh.world)
    assert [step for step, path in complete_checkpoints(tmp_path) if _is_good(path)] == [2, 4]


def _is_good(path: Path) -> bool:
    """A marker of half its length vouches for nothing: whoever reads it passes the checkpoint over."""
    try:
        return damaged_files(path) == []
    except CheckpointError:
        return False


@pytest.mark.ranks(2, timeout=60)
def test_a_directory_that_vanishes_while_saving_is_named(tmp_path: Path) -> None:
    """As when a network file system is unmounted, or somebody cleans up."""
    mesh = Mesh(dp=2)
    optimizer, root = trained(mesh), tmp_path / "checkpoints"
    sync = os.fsync
    other = folder.partial_path(checkpoint_path(root, 2)) / "rank-00000.written.json"

    def vanish(descriptor: int) -> None:
        sync(descriptor)
        while not other.exists():  # a file that is made meanwhile would keep its directory
            time.sleep(0.01)
        shutil.rmtree(root)

    with (
        mock.patch("os.fsync", vanish) if mesh.world.rank == 1 else contextlib.nullcontext(),
        pytest.raises(
            CheckpointWriteError, match=r"step-00000002 could not be written: .*No such file or directory"
        ),
    ):
        save_checkpoint(checkpoint_path(root, 2), optimizer, world=mesh.world)
    barrier(mesh.world)
    assert complete_checkpoints(root) == []


@pytest.mark.ranks(2, timeout=60)
def test_b094_nothing_is_whole_before_the_slowest_rank_has_written(tmp_path: Path) -> None:
    mesh = Mesh(dp=2)
    optimizer, path = trained(mesh), checkpoint_path(tmp_path, 2)
    sync, seen = os.fsync, []

    def slow(descriptor: int) -> None:
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            seen.append(path.exists())
            time.sleep(0.02)
        sync(descriptor)

    with mock.patch("os.fsync", slow) if mesh.world.rank == 1 else contextlib.nullcontext():
        save_checkpoint(path, optimizer, world=mesh.world)
    assert damaged_files(path) == []
    assert not any(seen)
    assert bool(seen) == (mesh.world.rank == 1)
