"""Checkpoints as files: what is whole, what is kept, that no damage is trained on and nothing is run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardweave.comm import Axis, Mesh, barrier, name_parameters
from shardweave.comm.testing import RankError, run_ranks
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import (
    CheckpointError,
    CheckpointWriteError,
    checkpoint_path,
    chunk_file,
    complete_checkpoints,
    damaged_files,
    folder,
    load_checkpoint,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
    storage,
)


def build(world: Axis, size: int = 8) -> tuple[nn.Module, ZeroOptimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, size), nn.Linear(size, 3))
    name_parameters(net)
    return net, ZeroOptimizer(net.parameters(), torch.optim.Adam, data=world, stage=3, module=net, lr=0.1)


def trained(world: Axis, steps: int = 1) -> tuple[nn.Module, ZeroOptimizer]:
    net, optimizer = build(world)
    for step in range(steps):
        net(torch.randn(4, 5) + step).square().sum().backward()
        optimizer.step()
    return net, optimizer


def saved(path: str) -> None:
    mesh = Mesh(dp=dist.get_world_size())
    _, optimizer = trained(mesh.data)
    save_checkpoint(path, optimizer, world=mesh.world, values={"step": 2})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("original") / "step-00000002"
    run_ranks(saved, 2, str(path))
    return path


def load_or_reason(path: str, patience: float = 0.2) -> str:
    """What every rank says about a checkpoint: "loaded", or why not. In one run of two ranks for many."""
    mesh = Mesh(dp=dist.get_world_size())
    _, optimizer = build(mesh.data)
    try:
        load_checkpoint(path, optimizer, world=mesh.world, patience=patience)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def reasons(paths: list[str]) -> list[str]:
    return [load_or_reason(path) for path in paths]


def on_all(paths: list[Path]) -> list[str]:
    """The reasons, after seeing that both ranks give the same."""
    first, second = run_ranks(reasons, 2, [str(path) for path in paths], timeout=60)
    assert first == second
    return list(first)


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def written(content: bytes) -> Callable[[Path], object]:
    """Puts other bytes into a file."""
    return lambda file: file.write_bytes(content)


FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "index.json", "complete")


def spoiled(original: Path, folder: Path, spoil: Callable[[Path], object], name: str = FILES[1]) -> Path:
    """A copy of a checkpoint, one file of which was spoiled."""
    folder.mkdir(exist_ok=True)
    path = Path(shutil.copytree(original, folder / f"{len(list(folder.iterdir()))}"))
    spoil(path / name)
    return path


def test_b139_a_pickle_in_place_of_any_file_is_refused_and_never_run(original: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    poison = pickle.dumps(Marker(marker))
    pickle.loads(pickle.dumps(Marker(tmp_path / "works")))  # noqa: S301 - the trap is a real one
    assert (tmp_path / "works").is_dir()
    assert sorted(FILES) == sorted(one.name for one in original.iterdir())
    paths = [spoiled(original, tmp_path / "copies", written(poison), name) for name in FILES]
    for name, reason in zip(FILES, on_all(paths), strict=True):
        assert name in reason
    whole_size = []  # of the size that the index says, and of one that a header could have
    for name in FILES[:2]:
        size = (original / name).stat().st_size
        padded = poison.ljust(size, b"\0")
        whole_size.append(spoiled(original, tmp_path / "copies", written(padded), name))
    for name, reason in zip(FILES, on_all(whole_size), strict=False):
        assert name in reason
    for path in (*paths, *whole_size):
        with contextlib.suppress(CheckpointError):  # the index itself
            assert damaged_files(path)
    assert not marker.exists()


def flip(bit: int) -> Callable[[Path], None]:
    """One bit, counted over the whole file."""

    def spoil(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[bit // 8 % len(content)] ^= 1 << bit % 8
        file.write_bytes(content)

    return spoil


def test_b095_one_flipped_bit_in_any_file_is_found_and_the_file_named(original: Path, tmp_path: Path) -> None:
    paths, names = [], []
    for name in FILES:
        bits = (original / name).stat().st_size * 8
        # Everywhere in the file: header length, header, first and last tensor.
        for bit in sorted({3, 70, *range(100, bits, bits // 7), bits - 1}):
            paths.append(spoiled(original, tmp_path / "copies", flip(bit), name))
            names.append(name)
    for path, name, reason in zip(paths, names, on_all(paths), strict=True):
        assert f"/{name} " in reason, (name, reason)
        try:
            found = damaged_files(path)
        except CheckpointError as error:
            found = [str(error)]
        assert f"/{name} " in found[0]


def test_b095_swapped_files_of_equal_size_are_found(original: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(original, tmp_path / "copy"))
    first, second = (path / name for name in FILES[:2])
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    assert "is damaged" in on_all([path])[0] or "bytes and should have" in on_all([path])[0]


def test_b094_a_file_that_lost_a_byte_or_is_gone_is_named(original: Path, tmp_path: Path) -> None:
    def shorten(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-1])

    short = spoiled(original, tmp_path / "copies", shorten)
    gone = spoiled(original, tmp_path / "copies", Path.unlink)
    unmarked = spoiled(original, tmp_path / "copies", Path.unlink, "complete")
    found = on_all([short, gone, unmarked])
    assert "rank-00001.safetensors has" in found[0]
    assert "rank-00001.safetensors is missing, or this rank cannot see it" in found[1]
    assert "is not a whole checkpoint" in found[2]


def test_a_load_that_is_refused_before_reading_changes_nothing(original: Path, tmp_path: Path) -> None:
    path = spoiled(original, tmp_path / "copies", Path.unlink, FILES[0])
    net, optimizer = build(Axis.single())
    before = [parameter.clone() for parameter in net.parameters()]
    with pytest.raises(CheckpointError, match=r"rank 0: .*is missing"):
        load_checkpoint(path, optimizer, world=Axis.single(), patience=0)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_every_file_is_plain_safetensors_under_the_names_of_the_tensors(original: Path) -> None:
    manifest = read_manifest(original)
    entries = {name: tensor for one in FILES[:2] for name, tensor in load_file(original / one).items()}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            found = entries.pop(chunk_file.entry_name(name, chunk.rectangle, entry.shape))
            assert tuple(found.shape) == chunk.rectangle.sizes
    assert entries == {}
    for name, file in manifest.files.items():
        assert file.sha256 == sha256((original / name).read_bytes()).hexdigest()


# -- views that differ between ranks -------------------------------------------------------------------------


def with_own_view(roots: list[str], delay: float) -> str:
    """Each rank looks for the checkpoint in a directory of its own; one appears late."""
    rank = dist.get_rank()
    if delay and rank == 2:
        hidden = Path(roots[rank] + ".hidden")
        if os.fork() == 0:
            time.sleep(delay)
            hidden.rename(roots[rank])
            os._exit(0)
    return load_or_reason(roots[rank], patience=5.0 if delay else 0.3)


def test_b097_all_ranks_decide_alike_whatever_each_can_see(original: Path, tmp_path: Path) -> None:
    whole = str(shutil.copytree(original, tmp_path / "whole"))
    lacking = str(spoiled(original, tmp_path / "lacking", Path.unlink))
    nothing = str(tmp_path / "nothing")
    for roots, ranks in (
        ([whole, nothing, nothing, nothing], "ranks 1, 2, 3"),
        ([whole, whole, whole, lacking], "rank 3"),
    ):
        found = run_ranks(with_own_view, 4, roots, 0.0, timeout=60)
        assert len(set(found)) == 1
        assert f"{ranks}: " in found[0]
        assert "cannot see it" in found[0]
    found = run_ranks(with_own_view, 4, [nothing, whole, whole, whole], 0.0, timeout=60)
    assert len(set(found)) == 1
    assert "is not a whole checkpoint" in found[0]
    late = Path(shutil.copytree(original, tmp_path / "late.hidden"))
    found = run_ranks(with_own_view, 4, [whole, whole, str(late.with_suffix("")), whole], 2.0, timeout=60)
    assert found == ["loaded"] * 4


# -- writing -------------------------------------------------------------------------------------------------


def every_open(directory: str) -> list[str]:
    """Saves with two ranks on each of two pretended machines, and tells which files this process wrote."""
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    mesh = Mesh(dp=4)
    _, optimizer = trained(mesh.data)
    path = Path(directory) / "step-00000001"
    opened: list[str] = []
    save_file, write = storage.__dict__["write_chunks"], folder.__dict__["_write_synced"]

    def note_tensors(tensors: Any, file: Path) -> Any:
        opened.append(file.name)
        return save_file(tensors, file)

    def note(file: Path, content: bytes) -> None:
        opened.append(file.name)
        write(file, content)

    storage.__dict__["write_chunks"] = note_tensors
    folder.__dict__["_write_synced"] = note
    save_checkpoint(path, optimizer, world=mesh.world)
    barrier(mesh.world)
    assert sorted(one.name for one in path.iterdir()) == sorted(
        {*read_manifest(path).files, "index.json", "complete"}
    )
    return opened


def test_b099_every_file_is_written_by_exactly_one_process(tmp_path: Path) -> None:
    opened = [name for of_rank in run_ranks(every_open, 4, str(tmp_path)) for name in of_rank]
    assert len(opened) == len(set(opened))
    assert set(opened) >= {"index.json", "complete", "rank-00000.safetensors"}


def replicas_written(path: str) -> int:
    """Stage 0: every rank holds everything."""
    mesh = Mesh(dp=4)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    name_parameters(net)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.Adam, data=mesh.data, stage=0)
    net(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    save_checkpoint(path, optimizer, world=mesh.world)
    barrier(mesh.world)
    return (Path(path) / storage.rank_file(mesh.world.rank)).stat().st_size


def test_writing_is_spread_over_replicas(tmp_path: Path) -> None:
    sizes = run_ranks(replicas_written, 4, str(tmp_path / "step-00000001"))
    assert max(sizes) < 1.3 * min(sizes)


def full_disk(folder: str, first: str) -> str:
    """A second checkpoint does not fit any more."""
    mesh = Mesh(dp=2)
    _, optimizer = build(mesh.data, size=8)
    load_checkpoint(first, optimizer, world=mesh.world)
    _, large = build(mesh.data, size=40_000)
    try:
        save_checkpoint(Path(folder) / "step-00000003", large, world=mesh.world)
    except CheckpointWriteError as error:
        return str(error)
    return "written"


def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A mount of a small file system needs root; a limit on the size of files fails at the same place, with EFBIG."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run_ranks(saved, 2, str(folder / "step-00000002"))
    first, second = run_ranks(limited, 2, str(folder), str(folder / "step-00000002"), timeout=60)
    assert first == second
    assert "step-00000003 could not be written: rank " in first
    assert damaged_files(folder / "step-00000002") == []
    assert [one.name for one in folder.iterdir()] == ["step-00000002"]


def limited(folder: str, first: str) -> str:
    """No file of this process may grow beyond 64 KiB: writing fails as on a full disk, with EFBIG."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    return full_disk(folder, first)


# -- interrupted writing -------------------------------------------------------------------------------------


def killed_while_writing(directory: str, victim: int, phase: str) -> None:
    """Saves step 2; dies while it saves step 4."""
    mesh = Mesh(dp=2)
    _, optimizer = trained(mesh.data)
    root = Path(directory)
    save_checkpoint(checkpoint_path(root, 2), optimizer, world=mesh.world)
    barrier(mesh.world)

    def die(*_: Any) -> Any:
        if mesh.world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def half(tensors: Any, file: Path) -> None:
        write(tensors, file)
        if mesh.world.rank == victim:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            die()

    write = storage.__dict__["write_chunks"]
    if phase == "half":
        storage.__dict__["write_chunks"] = half
    else:
        folder.__dict__[phase] = die
    save_checkpoint(checkpoint_path(root, 4), optimizer, world=mesh.world)
    prune_checkpoints(root, 1)


@pytest.mark.parametrize(
    ("victim", "phase"),
    [(1, "half"), (0, "half"), (0, "sync_directory"), (0, "_write_synced"), (1, "leave_note")],
)
def test_b094_b102_a_death_while_writing_leaves_the_one_before(
    tmp_path: Path, victim: int, phase: str
) -> None:
    with pytest.raises(RankError):
        run_ranks(killed_while_writing, 2, str(tmp_path), victim, phase, timeout=60)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2]
    assert damaged_files(checkpoint_path(tmp_path, 2)) == []
    # The next save of that step starts anew and is whole; what the death left is gone.
    run_ranks(saved, 2, str(checkpoint_path(tmp_path, 4)))
    prune_checkpoints(tmp_path, 1)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000004"]
    assert damaged_files(checkpoint_path(tmp_path, 4)) == []


def test_an_interrupted_replacement_leaves_the_one_before(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(original, tmp_path / "latest"))
    _, optimizer = build(Axis.single())

    class Death(BaseException):
        """Nobody catches it."""

    for number in range(3):  # before the old one is away, before the new one is there, before its marker is

        def die(*arguments: Any, left: list[int] = [number], rename: Any = os.rename) -> None:  # noqa: B006
            if not left[0]:
                raise Death
            left[0] -= 1
            rename(*arguments)

        with monkeypatch.context() as patch:
            if number < 2:
                patch.setattr(os, "rename", die)
            else:
                patch.setitem(
                    folder.__dict__, "sync_directory", lambda where: die() if where == tmp_path else None
                )
                patch.setattr(os, "rename", os.rename)
            with pytest.raises((Death, CheckpointWriteError)):
                save_checkpoint(path, optimizer, world=Axis.single(), values={"step": 3 + number})
        assert load_checkpoint(path, optimizer, world=Axis.single()).values == {"step": 2}
        assert damaged_files(path) == []
    save_checkpoint(path, optimizer, world=Axis.single(), values={"step": 9})
    assert load_checkpoint(path, optimizer, world=Axis.single()).values == {"step": 9}
    assert [one.name for one in tmp_path.iterdir()] == ["latest"]


def refusals(directory: str) -> list[str]:
    mesh = Mesh(dp=2)
    _, optimizer = trained(mesh.data)
    os.chdir(directory)
    found = []
    for path in (".", "", "/", "used", "used/..", "file"):
        try:
            save_checkpoint(path, optimizer, world=mesh.world)
        except ValueError as error:
            found.append(str(error))
    for values in ({"a": object()}, {"a": float("nan")}):
        try:
            save_checkpoint("new", optimizer, world=mesh.world, values=values)
        except ValueError as error:
            found.append(str(error))
    return found


def test_nothing_that_is_not_a_checkpoints_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    (tmp_path / "file").touch()
    first, second = run_ranks(refusals, 2, str(tmp_path))
    assert first == second
    assert len(first) == 8
    assert "used holds notes.txt, which is not a checkpoint's; give a directory of its own" in first[3]
    assert "file is there and is no directory" in first[5]
    assert "give numbers, text, lists and dicts" in first[6]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "used"]
    assert (tmp_path / "used" / "notes.txt").exists()


def test_pruning_leaves_links_files_and_foreign_directories(tmp_path: Path) -> None:
    archive = make(tmp_path / "archive", 8)
    root = tmp_path / "checkpoints"
    make(root, 12)
    (make(root, 5) / "notes.txt").touch()
    (root / "step-00000008").symlink_to(archive)
    (root / "step-00000009").touch()
    (root / "step-00000010").symlink_to(tmp_path / "gone")
    assert [step for step, _ in complete_checkpoints(root)] == [5, 8, 12]
    assert prune_checkpoints(root, 1) == []
    assert (archive / "complete").exists()


def test_a_folder_that_is_not_there_differs_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path / "none") == []
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"link is a link to .*unmounted, which is not there"):
        complete_checkpoints(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be read: Not a directory"):
        complete_checkpoints(tmp_path / "file")


# -- what is kept --------------------------------------------------------------------------------------------


def make(root: Path, step: int) -> Path:
    """Enough of a checkpoint to be counted."""
    path = checkpoint_path(root, step)
    path.mkdir(parents=True)
    (path / "complete").touch()
    return path


def test_b102_the_newest_are_kept_in_numeric_order(tmp_path: Path) -> None:
    for step in (900, 1000, 9900, 10000, 123456789):
        make(tmp_path, step)
    (tmp_path / ".step-00000040.partial").mkdir()
    (tmp_path / "step-00000050").mkdir()  # its marker was never written
    (tmp_path / ".step-999999999.partial").mkdir()  # perhaps being written now
    (tmp_path / "notes").mkdir()
    assert prune_checkpoints(tmp_path, 0) == [tmp_path / ".step-00000040.partial", tmp_path / "step-00000050"]
    prune_checkpoints(tmp_path, 3)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [9900, 10000, 123456789]
    prune_checkpoints(tmp_path, 1)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        ".step-999999999.partial",
        "notes",
        "step-123456789",
    ]


def rotate(folder: str) -> list[int]:
    mesh = Mesh(dp=4)
    _, optimizer = trained(mesh.data)
    for step in range(1, 5):
        save_checkpoint(checkpoint_path(Path(folder), step), optimizer, world=mesh.world)
        if mesh.world.is_first:
            prune_checkpoints(Path(folder), 2)
    barrier(mesh.world)
    return [step for step, _ in complete_checkpoints(Path(folder))]


def test_b102_ranks_rotate_together(tmp_path: Path) -> None:
    assert run_ranks(rotate, 4, str(tmp_path)) == [[3, 4]] * 4


def test_strange_names_are_no_checkpoints(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path / "none") == []
    for name in ("step-x", "step-1", "other", ".step-00000003.partial", "step-00000003.superseded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete").touch()
    assert complete_checkpoints(tmp_path) == []


def index_with(shape: list[int], chunks: list[Any], dtype: str = "float32") -> bytes:
    """An index with one tensor, as somebody might make it up."""
    tensor = {"shape": shape, "dtype": dtype, "chunks": chunks}
    file = {"bytes": 1, "sha256": "", "header_crc32": 0}
    rest = {"scalars": {}, "groups": [], "optimizer": {}, "ranks": 1, "values": {}}
    return json.dumps({"format": 2, "tensors": {"w": tensor}, "files": {"x": file}, **rest}).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"format": 9}', "has format 9 and this version reads 2"),
        (b"[]", "is not an index"),
        (b"\xff", "is not an index"),
        (b'{"format": 2}', "is not a whole index: KeyError"),
        (b'{"format": 2, "tensors": 3, "files": {}}', "is not a whole index: AttributeError"),
        (index_with([2], [[[0], [2], "../x", 0]]), r"chunks in \['\.\./x'\], which are not listed"),
        (index_with([2, 2], [[[0, 0], [2, 1], "x", 0], [[1, 0], [1, 2], "x", 0]]), "the chunks of w overlap"),
        (index_with([2], [[["0"], [2], "x", 0]]), "is not a whole index: TypeError"),
        (
            index_with([2], [[[0], [2], "x", 0]]).replace(b'"values": {}', b'"values": 3'),
            "is not a whole index",
        ),
        (
            index_with([2], [[[0], [2], "x", 0]]).replace(b'"bytes": 1', b'"bytes": "a"'),
            "no description of a file",
        ),
        (index_with([2], [[[1], [2], "x", 0]]), "is no part of w"),
        (index_with([2], [[[0], [1], "x", 0]]), "do not add up"),
        (index_with([2], [[[0], [2], "x", 0]], "load"), "has type 'load', which is none of torch's"),
        (b"[" * 100_000, "is not an index"),
    ],
)
def test_an_index_of_another_kind_is_named_even_with_a_right_marker(
    original: Path, tmp_path: Path, text: bytes, message: str
) -> None:
    path = Path(shutil.copytree(original, tmp_path / "copy"))
    (path / "index.json").write_bytes(text)
    (path / "complete").write_text(sha256(text).hexdigest())
    with pytest.raises(CheckpointError, match=message):
        read_manifest(path)
