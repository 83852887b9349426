"""`shardweave schedule`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from shardweave.launcher.cli import cli
from shardweave.pipeline import Schedule


def run(*arguments: str | int | Path) -> None:
    """The command in this process, without the end of the process."""
    cli.main(["schedule", *map(str, arguments)], standalone_mode=False)


def test_it_draws_with_bubble_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    run("1f1b", "--stages", "2", "--microbatches", "3")
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 2 stages on 2 ranks, 3 micro-batches",
        "",
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
        "",
        "F forward, B backward, . idle",
        "",
        "rank  bubble  idle inside  peak activations  unsettled sends",
        "   0   25.0%            3                 2                2",
        "   1   25.0%            0                 1                2",
        "",
        "bubble 25.0% of a step of 12; at most 2 micro-batches alive, in shares of a whole rank",
    ]


def test_stages_are_ranks_and_chunks_come_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    run("interleaved", "--stages", 2, "--microbatches", 2)
    assert "interleaved with --chunks 1 is 1f1b; use --chunks 2" in capsys.readouterr().err
    run("interleaved", "--stages", 2, "--microbatches", 2, "--chunks", 3)
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.startswith("interleaved: 2 ranks x 3 chunks = 6 stages, 2 micro-batches\n")
    run("zb-v", "--stages", 2, "--microbatches", 4)
    assert capsys.readouterr().out.startswith("zb-v: 2 ranks x 2 chunks = 4 stages, 4 micro-batches\n")


def test_costs_and_messages_change_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    run("zb-h1", "--stages", 2, "--microbatches", 2, "--costs", "1,1,0", "--message", "0.5")
    # 0F0, its message, 1F0 1I0 1F1 1I1, its message, 0I1
    assert "of a step of 7;" in capsys.readouterr().out


def test_json_has_the_contract_s_keys_and_is_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    run("zb-v", "--stages", 2, "--microbatches", 3, "--out", out)
    assert "written to" in capsys.readouterr().out
    values = json.loads(out.read_text())
    assert values["actions"][0][:2] == ["0F0", "0F1"]
    assert values["bubble_fraction"] == pytest.approx(1 / 19)
    assert values["peak_activations"] == [2, 2]
    assert Schedule.load(out).name == "zb-v"
    run(out)
    assert "bubble 5.3% of a step of 19;" in capsys.readouterr().out


@pytest.mark.parametrize("name, begins", [("a.svg", b"<svg"), ("a.png", b"\x89PNG"), ("a.txt", b"name:")])
def test_the_name_of_the_file_says_what_is_written(tmp_path: Path, name: str, begins: bytes) -> None:
    run("1f1b", "--stages", 2, "--microbatches", 3, "--out", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_schedule_of_one_s_own_is_proven(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("rank 0  0F0 0B0 0F1 0B1\nrank 1  1F0 1F1 1B0 1B1\n")
    with pytest.raises(click.ClickException, match=r"mine.txt: .*rank 0 at 0B0 for 1B0(.|\n)*\[0B0\]"):
        run(mine)
    with pytest.raises(click.ClickException, match=r"gone\.txt: No such file"):
        run(tmp_path / "gone.txt")
    mine.write_text("rank 0  0F0 0B0\nrank 1  1F0 1B0\n")
    with pytest.raises(click.ClickException, match="--stages is 3 and the file has 2"):
        run(mine, "--stages", 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["zb-x", "--stages", "2", "--microbatches", "2"], "unknown schedule 'zb-x'; choose one of"),
        (["1f1b", "--stages", "2"], "--microbatches is missing"),
        (["1f1b", "--microbatches", "2"], "--stages is missing"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--chunks", "2"], "chunks=2 has no effect"),
        (["dualpipe-v", "--stages", "2", "--microbatches", "3"], "at least twice as many as ranks"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--out", "a.gif"], "ends in one of .svg, .png"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--out", "no/a.png"], "no directory no"),
        (["1f1b", "--stages", "0", "--microbatches", "2"], "0 is not in the range"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "1,2"], "is not three numbers"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "1,1,-1"], "costs: weight is -1"),
    ],
)
def test_mistakes_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(click.ClickException) as caught:
        run(*arguments)
    assert message in caught.value.format_message()


def test_colours_only_where_a_terminal_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run("1f1b", "--stages", "2", "--microbatches", "3")
    assert "\x1b[38;5;16;48;5;81mF0" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    run("1f1b", "--stages", "2", "--microbatches", "3")
    drawn = capsys.readouterr().out
    assert "\x1b" not in drawn
    assert max(map(len, drawn.split("\n\n")[1].splitlines())) <= 30
