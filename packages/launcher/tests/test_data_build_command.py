"""``shardweave data build`` and ``train-tokenizer`` as a person types them: what is said, statuses, Ctrl-C and kill."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from packages.launcher.tests.commands import SHORT, Command, start_fresh
from packages.launcher.tests.small_tokenizers import byte_level, saved

from shardweave.launcher.cli import cli
from shardweave.launcher.data.indexed import IndexedTokens
from shardweave.launcher.data.tokenizer import open_tokenizer

TEXT = SHORT.read_text(encoding="utf-8")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["data", *map(str, arguments)], catch_exceptions=False)


def test_from_text_to_tokens_of_its_own_tokenizer(tmp_path: Path) -> None:
    made = _run("train-tokenizer", SHORT, "--vocab", 380, "--out", tmp_path / "words")
    assert (made.exit_code, made.stderr) == (0, "")
    assert made.stdout == f"{tmp_path / 'words'} has a tokenizer of 380 tokens, learned from 1 documents\n"
    built = _run(
        "build", SHORT, "--tokenizer", tmp_path / "words", "--out", tmp_path / "made", "--workers", 1
    )
    assert (built.exit_code, built.stderr) == (0, "")  # no bar without a terminal
    said = re.fullmatch(
        r"(.*): 1 documents, ([\d,]+) tokens of (.*) \(([\d.]+) bytes each\) in [\d.]+ s\n", built.stdout
    )
    assert said is not None
    assert (said[1], said[3]) == (str(tmp_path / "made"), str(tmp_path / "words"))
    tokens = IndexedTokens(tmp_path / "made")
    assert f"{len(tokens):,}" == said[2]
    words = open_tokenizer(str(tmp_path / "words"))
    assert words.decode(tokens.read(0, len(tokens) - 1).tolist()) == TEXT


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["build", "gone", "--out", "x"], 2, "error: there is no file or directory gone"),
        (
            ["build", "a.txt", "--out", "x", "--tokenizer", "gone"],
            2,
            "error: --tokenizer: there is no tokenizer gone",
        ),
        (
            ["build", "a.txt", "--out", "x", "--end-of-text", "9"],
            2,
            "error: --end-of-text: 9 is not the byte",
        ),
        (["build", "a.txt", "--out", "a.txt/x"], 3, "error: a.txt cannot be written: "),
        (
            ["train-tokenizer", "a.txt", "--out", "x", "--vocab", "9"],
            2,
            "error: --vocab 9: it has the 256 bytes",
        ),
        (
            ["train-tokenizer", "a.txt", "--out", "a.txt/x", "--vocab", "300"],
            3,
            "error: a.txt cannot be written: ",
        ),
    ],
)
def test_mistakes_and_their_statuses(
    arguments: list[str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a text")
    found = _run(*arguments)
    assert (found.exit_code, found.stdout) == (status, "")
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == 1
    assert os.listdir() == ["a.txt"]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Some seconds' work, in pieces of a tenth of one."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    saved(byte_level([TEXT], vocab=380), tmp_path / "words")
    for number in range(60):
        line = json.dumps({"text": f"{number} {TEXT}"}) + "\n"
        (folder / f"{number:02d}.jsonl").write_text(line * 50)  # beyond half a piece
    return folder


def _some_pieces(command: Command, folder: Path) -> None:
    until = time.monotonic() + 100
    while len(list(folder.glob("*.json"))) < 2:
        assert time.monotonic() < until
        assert command.poll() is None, command.err
        time.sleep(0.02)


def _nobody_reads(folder: Path) -> bool:
    """Whether no process has a file of this directory open."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(file.startswith(f"{folder}/") for file in files):
            return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_ended_keeps_its_pieces_and_leaves_no_process(
    inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["data", "build", "inputs", "--out", "made", "--tokenizer", "words", "--workers", "2"]
    arguments += ["--piece", str(1 << 18)]
    parts = tmp_path / "made.parts"
    with start_fresh(tmp_path, *arguments) as command:
        _some_pieces(command, parts)
        command.send_signal(number)
        status, out, err = command.end()
    kept = len(list(parts.glob("*.json")))
    assert (out, kept >= 2) == ("", True)
    if number is signal.SIGINT:
        assert status == 130
        said = re.fullmatch(r"interrupted: (\d+) of (\d+) pieces are kept in made.parts; the same .*\n", err)
        assert said is not None, err
        assert 2 <= int(said[1]) == kept < int(said[2])
    until = time.monotonic() + 10
    while not _nobody_reads(parts):
        assert time.monotonic() < until, "a worker outlives the build"
        time.sleep(0.05)
    for file in sorted(inputs.iterdir())[kept + 3 :]:  # the rest need not be waited for
        file.unlink()
    with start_fresh(tmp_path, *arguments) as command:
        status, out, err = command.end()
    assert status == 0, err
    said = re.fullmatch(r"(\d+) of (\d+) pieces are there already, from a build that was interrupted\n", err)
    assert said is not None, err
    assert (int(said[1]), int(said[2])) == (kept, kept + 3)
    assert out.startswith(f"made: {(kept + 3) * 50} documents")
    assert not parts.exists()


MEASURED = """
import re, resource, sys
from pathlib import Path
from shardweave.launcher.data.build import build
from shardweave.launcher.data.tokenizer import open_tokenizer

build(sys.argv[2:], Path(sys.argv[1]), open_tokenizer("byte"), workers=1)
assert "torch" not in sys.modules
# getrusage of the process itself has what it was forked from in it, too
own = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Lines, and one document; the peak of the build's own process and that of its worker, in KiB."""
    peaks = []
    for times in (1, 10):
        lines, text = tmp_path / f"{times}.jsonl", tmp_path / f"{times}.txt"
        lines.write_text((json.dumps({"text": TEXT}) + "\n") * (times * 600))
        text.write_text(TEXT * (times * 640))
        assert lines.stat().st_size + text.stat().st_size > times * 5_500_000
        arguments = ["-c", MEASURED, str(tmp_path / f"made{times}"), str(lines), str(text)]
        with start_fresh(tmp_path, *arguments, command=[sys.executable]) as command:
            status, out, err = command.end()
        assert status == 0, err
        peaks.append([int(number) for number in out.split()])
    for small, large in zip(*peaks, strict=True):
        assert large < small + 8 * 1024  # of 54 MB more
