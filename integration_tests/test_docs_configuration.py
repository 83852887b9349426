"""The configuration page says what the code does: the same keys and defaults, the same refusals."""

from __future__ import annotations

import re
from pathlib import Path

from shardweave.launcher import Config, batch_plan, layout_of
from shardweave.launcher.layout import check_fit
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


def test_the_run_over_slow_networks_can_start(tmp_path: Path) -> None:
    block = re.search(
        r"^```yaml\n(.*?)^```$", (DOCS / "slow-networks.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert block
    file = tmp_path / "page.yaml"
    file.write_text(block[1], encoding="utf-8")
    loaded = read_config(file)
    assert loaded.warnings == ()
    layout = layout_of(loaded.config)
    check_fit(loaded.config, layout, transformer_config(loaded.config))
    assert batch_plan(loaded.config, layout).accumulation == 1
