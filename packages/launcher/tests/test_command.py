"""The command as a person runs it: whole runs in processes of their own, and what is said when one cannot start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from packages.launcher.tests.commands import TEXT, Ended, rank_pids, run, run_fresh, runs, start, start_joined

from shardweave.comm.devices import accelerator
from shardweave.launcher import __version__
from shardweave.launcher.assembly import device_of
from shardweave.launcher.cli import cli
from shardweave.launcher.describe import dry_run, print_config
from shardweave.launcher.metrics import read_metrics
from shardweave.launcher.prepare import MachineError, check_machine, open_run, prepare
from shardweave.launcher.reading import load_config
from shardweave.launcher.request import Request

QUICKSTART = Path(load_config.__code__.co_filename).with_name("quickstart.yaml")
TINY = """
run: {name: tiny, steps: 4, eval_every: 2}
model: {layers: 2, hidden: 16, heads: 2, sequence: 16, head_z_loss: 0.1}
data: {source: text.txt}
parallel: {tensor: 2}
batch: {global: 4, micro: 2}
checkpoint: {every: 2}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a text and a configuration of two ranks."""
    (tmp_path / "text.txt").write_text(TEXT * 40)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.mark.timeout(400)
def test_a_run_from_start_to_text(place: Path) -> None:
    """The first as a person starts it; what follows is forked."""
    status, out, err = run_fresh(place, "train", "tiny.yaml", "run.stop_after=2")
    assert (status, err) == (0, "")
    assert "dp1 × tp2 × pp1 = 2 ranks" in out
    assert "step 1/4  loss " in out
    directory = place / "runs" / "tiny"
    assert load_config(directory / "config.yaml").parallel.data == 1
    ranks = json.loads((directory / "ranks.json").read_text())["ranks"]
    assert [(rank["rank"], rank["coordinates"]["tp"]) for rank in ranks] == [(0, 0), (1, 1)]
    assert all(rank["host"] and rank["pid"] > 1 for rank in ranks)
    assert {path.name for path in (directory / "ranks").glob("*.log")} == {"rank-00000.log", "rank-00001.log"}
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-00000002"]

    status, out, err = run(place, "train", "tiny.yaml")
    assert (status, err) == (0, "")
    assert "resumed from " in out
    assert "step 2/4" not in out
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]
    assert lines[0]["comm_bytes"]["tp"] > 0
    assert lines[0]["tokens"] == 64
    assert 20 < lines[0]["head_z_loss"] < 40  # of 256 words about alike: log(256)^2 = 30.7
    assert 5 < lines[0]["loss"] < 6  # log(256) = 5.5, and nothing of that
    assert lines[0]["mfu"] is None
    for label in ("done ", "metrics ", "checkpoint ", "next "):
        assert f"\n{label}" in out
    assert "shardweave generate runs/tiny" in out

    status, out, err = run(place, "train", "tiny.yaml")
    assert (status, err) == (0, "")
    assert "4 steps already complete" in out

    status, out, err = run(place, "generate", "runs/tiny", "--prompt", "It is", "--tokens", "20")
    assert (status, err) == (0, "")
    assert out.startswith("It is")
    assert len(out.encode()) >= 5 + 20


@pytest.mark.timeout(400)
def test_mistakes_end_with_their_status_and_one_paragraph(place: Path) -> None:
    (place / "typo.yaml").write_text("parallel:\n  tensr: 2\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # The first is found while the process that forks ranks still imports, which it does in a fresh interpreter.
        cases: dict[tuple[str, ...], tuple[Callable[..., Ended], int, str]] = {
            ("typo.yaml",): (run_fresh, 2, "typo.yaml:2: parallel.tensr: there is no such key"),
            ("tiny.yaml", "--port", str(port)): (run, 3, f"port {port} on 127.0.0.1 is taken"),
            ("tiny.yaml", "run.dir=/proc/nowhere"): (run, 3, "cannot be made"),
        }
        for arguments, (start_and_wait, expected, text) in cases.items():
            status, _, err = start_and_wait(place, "train", *arguments)
            assert status == expected, err
            assert err.startswith("error: ")
            assert text in err
            assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("parallel.tensor=3", "`parallel.tensor: 3` does not divide `model.heads: 2`; use 1 or 2"),
        ("data.source=empty.txt", "data.source: empty.txt holds no text"),
        ("zero.offload=cpu", "offloading the optimizer state is not built yet"),
        ("batch.global=5", "`batch.global: 5` is not a multiple of"),
    ],
)
def test_a_dry_run_finds_every_mistake_of_a_start(
    place: Path, override: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "empty.txt").write_text("")
    assert dry_run(Request.of(["tiny.yaml", override])) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: command line: ")
    assert text in err
    assert len(err.strip().splitlines()) == 1


def test_a_machine_that_cannot_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    overview = prepare(Request.of(["tiny.yaml"])).overview
    check_machine(overview)
    large = ["model.hidden=65536", "model.layers=2000", "parallel.tensor=1"]
    with pytest.raises(MachineError, match=r"the ranks need about .* GiB together and this machine has"):
        check_machine(prepare(Request.of(["tiny.yaml", *large, "run.device=cpu"])).overview)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(
        MachineError, match=r"has 10 B free and one checkpoint takes 126 KiB; free some space"
    ):
        check_machine(overview)


@pytest.fixture
def cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch as built for CUDA, which PyPI serves by default, on a machine without one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    accelerator.cache_clear()
    yield
    accelerator.cache_clear()


@pytest.mark.usefixtures("cuda_without_a_gpu")
def test_a_cuda_build_without_a_gpu_runs_on_the_cpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    overview = prepare(Request.of(["tiny.yaml"])).overview
    check_machine(overview)
    assert device_of(overview.config) == torch.device("cpu")
    overview = prepare(Request.of(["tiny.yaml", "run.device=cuda"])).overview
    with pytest.raises(MachineError, match=r"`run.device: cuda`: this machine has none"):
        check_machine(overview)
    with pytest.raises(ValueError, match=r"`run.device: cuda` is not on this machine \(accelerator: none\)"):
        device_of(overview.config)


def test_starting_over_sets_the_earlier_run_aside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    overview = prepare(Request.of(["tiny.yaml", "checkpoint.resume=never"])).overview
    first = open_run(overview)
    assert (first.step, first.aside) == (0, None)
    (place / "runs/tiny/metrics.jsonl").touch()
    with pytest.raises(
        MachineError, match=rf"runs/tiny is in use by process {os.getpid()} on .*use another run.name"
    ):
        open_run(overview)
    first.lock.release()
    again = open_run(overview)
    assert (again.step, again.aside) == (0, Path("runs/tiny.1"))
    assert not again.directory.metrics.exists()
    with pytest.raises(MachineError, match="is in use"):
        open_run(overview)


@pytest.mark.timeout(200)
def test_a_killed_rank_ends_the_run_and_is_named_first(place: Path) -> None:
    endless = ("run.steps=100000", "checkpoint.every=0", "run.eval_every=0")
    with start(place, "train", "tiny.yaml", *endless) as command:
        metrics = place / "runs" / "tiny" / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while len(read_metrics(metrics)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = rank_pids(place / "runs" / "tiny")
        os.kill(pids[1], signal.SIGKILL)
        status, _, err = command.end(timeout=60)  # what waits for the killed one would wait for 300 s
        assert not any(runs(pid) for pid in pids)
    assert status == 128 + signal.SIGKILL
    assert err.startswith("error: rank 1 on ")
    assert "SIGKILL" in err.splitlines()[0]
    assert "rank-00001.log" in err


@pytest.mark.timeout(200)
def test_ranks_that_something_else_started_join(place: Path) -> None:
    """As srun starts them; by torchrun: `test_stopping_command` and, on several hosts, integration."""
    with start_joined(place, 2, "train", "tiny.yaml") as ranks:
        ended = [rank.end() for rank in ranks]
    assert [status for status, _, _ in ended] == [0, 0], ended
    out = "".join(out for _, out, _ in ended)
    assert out.count("\nstep 4/4  loss ") == 1
    assert out.count("\nnext ") == 1
    with start_joined(place, 3, "train", "tiny.yaml") as ranks:
        status, _, err = ranks[0].end()
        # The others give it time to end them, as torchrun and srun do, and would say it as theirs alone after that.
        assert not any(other.err.startswith("error: ") for other in ranks[1:])
    assert status != 0
    assert err.count("error: tiny.yaml:5: 3 ranks were started, which is not a multiple of 2") == 1


def test_help_version_and_unknown_commands() -> None:
    runner = CliRunner()
    assert __version__ in runner.invoke(cli, ["--version"]).output
    for command in ([], ["train"], ["generate"]):
        text = runner.invoke(cli, [*command, "--help"]).output
        assert "Example:" in text
        assert "shardweave " in text
    assert runner.invoke(cli, ["trian"]).exit_code == 2
    assert runner.invoke(cli, ["train", "--dry-rum"]).exit_code == 2


def test_b118_the_dry_run_shows_layout_stages_batch_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(Request.of([str(QUICKSTART), "run.dir=/tmp/none"])) == 0
    out = capsys.readouterr().out
    for text in (
        "dp2 × tp2 × pp2 = 8 ranks, ZeRO-1",
        "16 sequences = 2 micro × 4 accumulation × 2 data",
        "859,136 parameters",
        "dp 1: rank 6 (tp 0)  rank 7 (tp 1)",
        "block",
        "activations",
    ):
        assert text in out
    assert dry_run(Request.of(["parallel.tensor=3"])) == 2
    assert "does not divide" in capsys.readouterr().err
    assert dry_run(Request.of(["parallel.schedule=gpipe", "run.dir=/tmp/none"])) == 0
    assert "has no effect because" in capsys.readouterr().err


def test_the_printed_configuration_is_resolved_and_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_config(Request.of([str(QUICKSTART), "optimizer.lr=5e-4"])) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    config = load_config(path)
    assert (config.model.vocab, config.model.ffn, config.model.kv_heads) == (256, 512, 4)
    assert (config.optimizer.lr, config.parallel.data) == (5e-4, 2)
    assert print_config(Request.of(["run.stepz=3"])) == 2
    assert "run.stepz" in capsys.readouterr().err


def test_the_first_argument_is_a_file_unless_it_is_an_override(place: Path) -> None:
    assert Request.of([]) == Request()
    assert Request.of(["a.yaml", "x=1"], port=3) == Request("a.yaml", ("x=1",), 3)
    assert Request.of(["x=1", "y=2"]) == Request(None, ("x=1", "y=2"))
    odd = place / "lr=3.yaml"
    odd.touch()
    assert Request.of([str(odd)]) == Request(str(odd))
