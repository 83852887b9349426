"""A run's layout on fewer or more ranks: the data axis gives way, and nothing of the batch."""

from __future__ import annotations

import pytest

from shardweave.launcher.fitting import fit_layout
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.shape import transformer_config

SETTINGS = ("model.layers=4", "model.hidden=32", "model.heads=4", "model.sequence=16", "parallel.data=auto")


@pytest.mark.parametrize(
    "settings, ranks, data, micro, accumulation, idle",
    [
        ("batch.global=16 batch.micro=2", 8, 8, 2, 1, 0),
        ("batch.global=16 batch.micro=2", 4, 4, 2, 2, 0),
        ("batch.global=16 batch.micro=2", 1, 1, 2, 8, 0),
        ("batch.global=16 batch.micro=2", 7, 4, 2, 2, 3),  # 5 to 7 do not divide 16
        ("batch.global=16 batch.micro=2", 16, 16, 1, 1, 0),  # the micro-batch gives way
        ("batch.global=16 batch.micro=2", 40, 16, 1, 1, 24),
        ("batch.global=24 batch.micro=4", 8, 8, 3, 1, 0),  # the largest divisor of 3 below 4
        ("batch.global=16 batch.micro=2 parallel.data=4", 8, 4, 2, 2, 4),  # no more than was asked for
        ("batch.global=16 batch.micro=2 parallel.tensor=2 parallel.pipeline=2", 8, 2, 2, 4, 0),
        ("batch.global=16 batch.micro=2 parallel.tensor=2 parallel.pipeline=2", 7, 1, 2, 8, 3),
        ("batch.global=16 batch.micro=4 parallel.pipeline=2 parallel.schedule=dualpipe-v", 4, 2, 2, 4, 0),
        ("batch.global=12 batch.micro=1 zero.replicas=2", 5, 4, 1, 3, 1),
        ("batch.global=12 batch.micro=1 zero.replicas=2", 3, 2, 1, 6, 1),  # 3 cannot be two copies
        ("batch.global=12 batch.micro=1 model.experts=4 parallel.expert=2", 7, 6, 1, 2, 1),
    ],
)
def test_the_data_axis_gives_way(
    settings: str, ranks: int, data: int, micro: int, accumulation: int, idle: int
) -> None:
    config = load_config(None, [*SETTINGS, *settings.split()])
    fitted = fit_layout(config, ranks, transformer_config(config))
    assert (fitted.layout.data, fitted.plan.micro, fitted.plan.accumulation) == (data, micro, accumulation)
    assert fitted.idle == idle
    assert fitted.plan.global_batch == config.batch.global_ == data * micro * accumulation
    for axis in ("tensor", "pipeline", "context"):
        assert getattr(fitted.layout, axis) == getattr(config.parallel, axis)
    # the same from the command line
    again = load_config(None, [*SETTINGS, *settings.split(), *fitted.overrides])
    assert again == fitted.config
    assert ("left over" in str(fitted)) == bool(idle)


def test_fewer_ranks_than_a_copy_of_the_model_are_refused() -> None:
    config = load_config(None, [*SETTINGS, "parallel.tensor=2", "parallel.pipeline=2"])
    with pytest.raises(
        ConfigError, match=r"3 ranks are too few for one copy of the model .* = 4\); let at least 4"
    ):
        fit_layout(config, 3, transformer_config(config))


def test_what_fits_no_number_of_ranks_is_refused_with_its_reason() -> None:
    config = load_config(None, [*SETTINGS, "zero.replicas=2", "batch.global=4", "batch.micro=1"])
    with pytest.raises(ConfigError, match=r"zero\.replicas: 2"):
        fit_layout(config, 1, transformer_config(config))
