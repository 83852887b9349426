"""The configuration page says what the code does: the same keys and defaults, the same refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from shardweave.launcher import Config, batch_plan, layout_of
from shardweave.launcher.layout import check_fit
from shardweave.launcher.metrics import read_metrics
from shardweave.launcher.reading import load_config, read_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.unbuilt import table

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_defaults_on_the_page_are_the_defaults(tmp_path: Path) -> None:
    block = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    assert block
    file = tmp_path / "page.yaml"
    file.write_text(block[1], encoding="utf-8")
    assert load_config(file).plain() == Config().plain()
    keys = {name for value in Config().plain().values() if isinstance(value, dict) for name in value}
    assert [
        key for key in sorted(keys | set(Config().plain())) if not re.search(rf"\b{key}:", block[1])
    ] == []


def test_what_is_not_built_is_said_on_the_page() -> None:
    section = PAGE.split("## What is not built yet")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", section, re.M)
    assert sorted(listed) == sorted(".".join(str(part) for part in row.path) for row in table)


def test_every_block_of_keys_is_described() -> None:
    blocks: list[type] = [*Config.blocks().values(), Config]
    for block in blocks:
        assert f"::: {block.__module__}.{block.__name__}\n" in PAGE


def _run_of(page: str, folder: Path) -> Path:
    """The configuration on a page, as a file."""
    block = re.search(r"^```yaml\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    assert block
    file = folder / "page.yaml"
    file.write_text(block[1], encoding="utf-8")
    return file


def test_the_run_with_experts_trains(tmp_path: Path) -> None:
    assert read_config(_run_of("experts.md", tmp_path)).warnings == ()
    command = [sys.executable, "-m", "shardweave.launcher", "train", "page.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "busiest expert" in done.stdout
    steps = [record for record in read_metrics(tmp_path / "runs/experts/metrics.jsonl") if "loss" in record]
    assert len(steps) == 20
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    told = re.findall(r"^\| `(\w+)` \|", (DOCS / "experts.md").read_text(encoding="utf-8"), re.M)
    assert {"auxiliary_loss", "expert_load", "dropped_share"} <= set(told) <= set(steps[-1])


def test_the_run_over_slow_networks_can_start(tmp_path: Path) -> None:
    loaded = read_config(_run_of("slow-networks.md", tmp_path))
    assert loaded.warnings == ()
    layout = layout_of(loaded.config)
    check_fit(loaded.config, layout, transformer_config(loaded.config))
    assert batch_plan(loaded.config, layout).accumulation == 1
