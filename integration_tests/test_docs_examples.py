"""Every Python example that a reader can copy runs: the blocks of the READMEs and of the documentation.

A page is one program: its blocks run in order, in one process of their own, with one thread, in an empty folder. It is
forked from one that has imported torch, with what its first optimizer imports, and nothing else: that takes as long as
the rest. A block that is not meant to run is fenced as `text`, `console` or `yaml`, not as `python`. A block with a
title (`python title="train.py"`) is a script of its own, for the `torchrun` line that the page shows, and runs in fresh
interpreters.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration_tests.example import run_script

from shardweave.comm.zygote import Entry, Zygote

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
SCRIPT = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.M | re.S)
TORCHRUN = re.compile(r"^\$ torchrun (.* (\S+\.py))$", re.M)


def program(page: Path) -> str:
    """The blocks of a page, each at the line where it stands, so that a traceback points into the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        start = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block[1].splitlines()):
            lines[start + offset] = line
    return "\n".join(lines)


def has_example(page: Path) -> bool:
    """Whether a page has a block to run."""
    return FENCE.search(page.read_text(encoding="utf-8")) is not None


WITH_EXAMPLES = [page for page in PAGES if has_example(page)]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Not the tests' own: it must not have imported anything that an example could have forgotten to import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with Zygote.start(("torch", "torch._dynamo"), fresh=True) as started:
            yield started


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, zygote: Zygote) -> None:
    script, said = tmp_path / "example.py", tmp_path / "said"
    script.write_text(program(page), encoding="utf-8")
    folder = tmp_path / "empty"
    folder.mkdir()
    entry = Entry.of(run_script)
    with zygote.spawn(entry, [(str(script.resolve()), str(folder))], output=[said]) as group:
        ended = group.poll(timeout=240)
    assert [one.status for one in ended] == [0], (
        f"an example of {page.relative_to(ROOT)} fails:\n{said.read_text()}"
    )


def scripts() -> list[tuple[Path, str, str, str]]:
    """Page, name, text and the arguments that torchrun is shown with, of every script."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = {match[2]: match[1] for match in TORCHRUN.finditer(text)}
        found += [(page, match[1], match[2], shown[match[1]]) for match in SCRIPT.finditer(text)]
    return found


@pytest.mark.parametrize(
    ("page", "name", "text", "arguments"),
    scripts(),
    ids=[f"{page.stem}-{name}" for page, name, *_ in scripts()],
)
def test_scripts_run(page: Path, name: str, text: str, arguments: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments.split()],
        cwd=tmp_path,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="error"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, f"{name} of {page.relative_to(ROOT)} fails:\n{result.stderr}"


def test_readmes_have_an_example() -> None:
    readmes = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
    assert [page.relative_to(ROOT) for page in readmes if not has_example(page)] == []
