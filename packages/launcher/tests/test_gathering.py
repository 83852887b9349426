"""What stage 3 gathers at a time is foretold, and so is a bound that cannot be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from packages.launcher.tests.commands import SHORT

from shardweave.comm.testing import run_ranks
from shardweave.launcher.assembly import layout_of_mesh
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.gathering import check_gathering, gathered
from shardweave.launcher.layout import layout_of
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.staging import staging_of
from shardweave.launcher.trainer import Trainer
from shardweave.zero.residency import Residency

RUN: Mapping[str, Any] = {
    "model.layers": 3,
    "model.hidden": 32,
    "model.heads": 4,
    "model.vocab": 259,
    "model.sequence": 8,
    "batch.global": 4,
    "batch.micro": 1,
    "zero.stage": 3,
    "data.source": SHORT,
}
FINE = {"comm.bucket_mb": 0.02}
"""Every matrix is a unit of its own."""
CASES: tuple[Mapping[str, Any], ...] = (
    {"parallel.data": 4},
    {"parallel.data": 4, "zero.prefetch": 2, **FINE},
    {"parallel.data": 4, "zero.keep_gathered": 9000, "zero.prefetch": 0, "model.tie_embeddings": "false"},
    {"parallel.data": 4, "zero.replicas": 2, "model.position": "learned"},
    {"parallel.data": 2, "parallel.tensor": 2, **FINE},
    {"parallel.data": 4, "model.experts": 4, "parallel.expert": 2, **FINE},
    {
        "parallel.data": 4,
        "model.experts": 4,
        "parallel.expert": 4,
    },  # experts are on one rank each, as they are
    {"parallel.data": 2, "parallel.pipeline": 2, "zero.prefetch": 2, **FINE},
    {"parallel.data": 2, "parallel.pipeline": 2, "parallel.schedule": "zb-v", "zero.prefetch": 0, **FINE},
    {"parallel.data": 2, "parallel.pipeline": 2, "parallel.schedule": "interleaved", "parallel.chunks": 2},
)


def config_of(settings: Mapping[str, Any]) -> Config:
    return load_config(None, [f"{name}={value}" for name, value in {**RUN, **settings}.items()])


def least_of(config: Config) -> int:
    """Of the stage that needs most at once."""
    layout, shape = layout_of(config), transformer_config(config)
    staging = staging_of(config, layout, shape)
    return max(
        gathered(config, layout, shape, staging.parts_of(rank)).least for rank in range(layout.pipeline)
    )


def peak(settings: Mapping[str, Any]) -> tuple[int, int]:
    """The most that this rank gathers in two steps, and what is foretold of its stage."""
    config = config_of(settings)
    mesh = mesh_of(config, layout_of(config))
    trainer, found = Trainer(config, mesh), [0]
    start = Residency._start

    def watched(residency: Any, member: Any) -> None:
        start(residency, member)
        found[0] = max(found[0], residency.live)

    Residency._start = watched  # type: ignore[assignment, method-assign]
    try:
        for _ in range(2):
            trainer.train_step()
    finally:
        Residency._start = start  # type: ignore[method-assign]
    layout, shape = layout_of_mesh(mesh), transformer_config(config)
    told = gathered(config, layout, shape, staging_of(config, layout, shape).parts_of(mesh.pp.rank))
    mesh.close()
    return found[0], told.most


def every_peak() -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Of every case, as it is and with the smallest bound that is let through."""
    return [
        (peak(case), peak({**case, "zero.max_live_parameters": least_of(config_of(case))})) for case in CASES
    ]


@pytest.mark.timeout(180)
def test_what_is_gathered_at_a_time_is_foretold() -> None:
    by_rank = run_ranks(every_peak, 4, timeout=150)
    for number, case in enumerate(CASES):
        for (found, told), (bounded, bound) in (of_rank[number] for of_rank in by_rank):
            assert bounded <= bound <= least_of(config_of(case)), case
            if "parallel.schedule" in case:  # of several stages it is a bound
                assert 0.5 * told <= found <= told, case
                continue
            # Of a module that has several units, any may be the one that is gathered ahead.
            assert 0.98 * told <= found <= told, case
            assert found == told or "parallel.tensor" in case, case


def test_the_smallest_bound_is_named() -> None:
    config = config_of({"parallel.data": 2})
    layout, shape = layout_of(config), transformer_config(config)
    needed = least_of(config)
    with pytest.raises(
        ConfigError, match=rf"layers.* runs; use {needed} or more, auto, or a smaller comm.bucket_mb"
    ):
        check_gathering(
            config_of({"parallel.data": 2, "zero.max_live_parameters": needed - 1}), layout, shape
        )
    check_gathering(config_of({"parallel.data": 2, "zero.max_live_parameters": needed}), layout, shape)
    # Nothing is gathered by one data rank, or where every rank of a copy has all.
    for alone in ({"parallel.data": 1}, {"parallel.data": 2, "zero.replicas": 2}):
        config = config_of({**alone, "zero.max_live_parameters": 1})
        check_gathering(config, layout_of(config), shape)
        assert least_of(config) == 0
