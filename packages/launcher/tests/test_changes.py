"""The table of what may change between a checkpoint and its continuation: complete, and applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shardweave.launcher.changes import TABLE, Kind, changed_settings, row_of
from shardweave.launcher.config import Config
from shardweave.launcher.reading import load_config


def _paths(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_setting_is_decided_and_no_row_is_of_a_setting_that_does_not_exist() -> None:
    paths = list(_paths(Config().plain()))
    for path in paths:
        row_of(path)  # a new block needs a row
    for row in TABLE:
        assert any(path == row.path or path.startswith(f"{row.path}.") for path in paths), row


def test_the_longest_path_decides() -> None:
    assert row_of("model.hidden").kind is Kind.REFUSED
    assert row_of("model.dropout").kind is Kind.TOLD
    assert row_of("parallel.tensor").kind is Kind.FREE
    with pytest.raises(KeyError):
        row_of("nothing.of.this")


@pytest.mark.parametrize(
    ("override", "refused", "told"),
    [
        ("parallel.pipeline=2", 0, 0),
        ("zero.stage=2", 0, 0),
        ("zero.stage=3", 0, 0),
        ("zero.prefetch=0", 0, 0),
        ("zero.max_live_parameters=1000", 0, 0),
        ("zero.keep_gathered=1000", 0, 0),
        ("parallel.keep_inputs=true", 0, 0),
        ("parallel.decomposed=auto", 0, 0),
        ("batch.chunked_loss=true", 0, 0),
        ("run.name=other", 0, 0),
        ("data.source=/elsewhere", 0, 0),
        ("model.layers=5", 1, 0),
        ("model.experts_per_token=1", 1, 0),
        ("zero.replicas=2", 0, 0),
        ("parallel.expert=2", 0, 0),
        ("comm.hierarchy=flat", 0, 0),
        ("comm.compression=topk", 0, 1),
        ("comm.warmup=3", 0, 1),
        ("optimizer.lr=1", 0, 1),
        ("optimizer.betas=[0.8, 0.9]", 0, 1),
        ("batch.global=32", 0, 1),
        ("precision=bf16", 0, 1),
        ("precision=fp64", 1, 0),
        ("model.sequence=64", 0, 1),
    ],
)
def test_one_change(override: str, refused: int, told: int) -> None:
    there, here = load_config(None, []).plain(), load_config(None, [override]).plain()
    found = changed_settings(there, here)
    assert (len(found[0]), len(found[1])) == (refused, told)
    assert all(override.split("=")[0] in text for texts in found for text in texts)


def test_biases_of_routers_are_there_or_not() -> None:
    def changed(there: float, here: float) -> tuple[int, int]:
        plain = [
            load_config(None, ["model.experts=4", f"model.router_bias={rate}"]).plain()
            for rate in (there, here)
        ]
        refused, told = changed_settings(*plain)
        return len(refused), len(told)

    assert changed(0.01, 0.02) == (0, 1)
    assert changed(0.0, 0.01) == changed(0.01, 0.0) == (1, 0)


def test_a_learned_table_of_positions_does_not_change_its_length() -> None:
    there = load_config(None, ["model.position=learned"]).plain()
    here = load_config(None, ["model.position=learned", "model.sequence=64"]).plain()
    assert changed_settings(there, here) == (("`model.sequence: 64` (there: 128)",), ())


def test_a_scaling_of_rotary_is_one_setting_and_may_change() -> None:
    """A model goes on with longer sequences; from none, to none, and from one to another."""
    kinds = (
        "model.rotary_scaling={kind: linear, factor: 2}",
        "model.rotary_scaling={kind: linear, factor: 4}",
    )
    plain = [
        load_config(None, ["model.position=rotary", *more]).plain() for more in ([], *([k] for k in kinds))
    ]
    for there, here in ((0, 1), (1, 0), (1, 2)):
        refused, told = changed_settings(plain[there], plain[here])
        assert not refused
        assert len(told) == 1
        assert told[0].startswith("`model.rotary_scaling: ")


def test_a_setting_that_an_older_version_did_not_know_is_left_out() -> None:
    there, here = Config().plain(), Config().plain()
    del there["guard"]["spike"]
    assert changed_settings(there, here) == ((), ())
