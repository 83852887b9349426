"""From settings to how gradients travel: kinds, copies of shards, what goes together, and what compression keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardweave.comm import (
    CommOptions,
    Compression,
    Mesh,
    OneBit,
    PowerSGD,
    TopK,
    Topology,
    TwoBit,
    all_reduce,
)
from shardweave.launcher.assembly import assemble
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.communication import (
    comm_options,
    compression_of,
    idle_over,
    mesh_of,
    num_replicas,
    residual_bytes,
)
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.layout import Layout, check_fit, layout_of
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config, read_config
from shardweave.launcher.request import Request
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.verify.question import ask

SMALL = (
    "model.layers=2", "model.hidden=16", "model.heads=2", "model.sequence=8", "batch.global=8", "batch.micro=1",
    "optimizer.warmup=1", "optimizer.lr=1e-2", "run.steps=20",
)  # fmt: skip


def _config(*overrides: str) -> Config:
    return load_config(None, [*SMALL, *overrides])


def _dataset() -> Dataset:
    tokens = np.random.default_rng(5).integers(97, 105, 8 * 40 + 1).astype(np.uint8)
    return Dataset.of_tokens(tokens, 8)


@pytest.mark.parametrize(
    ("overrides", "compression"),
    [
        ((), None),
        (("comm.compression=onebit",), OneBit(warmup=10)),
        (("comm.compression=twobit", "comm.warmup=0"), TwoBit(warmup=0)),
        (("comm.compression=topk", "comm.density=0.25"), TopK(warmup=10, density=0.25)),
        (("comm.compression=powersgd", "comm.rank=2", "comm.warmup=1"), PowerSGD(warmup=1, rank=2)),
    ],
)
def test_how_gradients_are_sent(overrides: tuple[str, ...], compression: Compression | None) -> None:
    comm = _config(*overrides).comm
    assert compression_of(comm) == compression
    assert comm_options(comm) == CommOptions(background=compression is not None)


def test_how_axes_communicate() -> None:
    comm = _config("comm.hierarchy=two-level", "comm.shared_memory=false", "comm.debug=true").comm
    assert comm_options(comm) == CommOptions(hierarchy="two-level", shared_memory=False, debug=True)


def test_stage_0_shards_nothing_that_could_be_copied() -> None:
    assert num_replicas(_config("zero.replicas=2")) == 2
    assert num_replicas(_config("zero.replicas=2", "zero.stage=0")) == 1


def test_copies_divide_the_data_ranks_once_these_are_known() -> None:
    config = _config("zero.replicas=3", "parallel.tensor=2")
    shape = transformer_config(config)
    check_fit(config, layout_of(config, 12), shape)
    text = r"`zero.replicas: 3` does not divide the 4 data ranks \(`parallel.data`\).*use 1, 2 or 4"
    with pytest.raises(ConfigError, match=text):
        check_fit(config, layout_of(config, 8), shape)
    idle = _config("zero.replicas=3", "zero.stage=0")
    check_fit(idle, Layout(data=4), transformer_config(idle))


def test_a_mesh_without_the_copies_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"`zero.replicas: 2`, but the mesh has 1; build it with Mesh\(..., rep"
    ):
        assemble(_config("zero.replicas=2"), Mesh.single())


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("zero.reduce_dtype=bf16", "has no effect with `comm.compression: topk`.*use zero.reduce_dtype=auto"),
        ("zero.shard_between_micro_batches=true", "does not go with `comm.compression: topk`.*=auto or comm"),
    ],
)
def test_what_does_not_go_with_compression(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _config("comm.compression=topk", "zero.stage=2", override)
    _config("zero.stage=2", override)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("zero.replicas=2", "zero.stage=0"), "`zero.replicas: 2` has no effect because `zero.stage` is 0"),
        (
            ("comm.compression=onebit", "comm.density=0.5"),
            "`comm.density: 0.5` has no effect because `comm.compression` is onebit",
        ),
        (("comm.compression=topk", "comm.rank=2"), "`comm.rank: 2` has no effect because `comm.compression` is topk"),
        (("comm.rank=2",), "`comm.rank: 2` has no effect because `comm.compression` is none"),
        (
            ("comm.compression=twobit", "comm.warmup=60"),
            "no effect because `run.steps: 60` are all within `comm.warmup: 60` plain steps",
        ),
    ],
)  # fmt: skip
def test_settings_without_effect(overrides: tuple[str, ...], text: str) -> None:
    [warning] = read_config(None, overrides).warnings
    assert text in warning


def test_one_data_rank_sends_no_gradients() -> None:
    config = _config("comm.compression=onebit")
    [problem] = idle_over(config, Layout(tensor=2))
    assert "`comm.compression: onebit` has no effect because there is one data rank" in problem.text
    assert list(idle_over(config, Layout(data=2))) == []
    assert list(idle_over(_config(), Layout())) == []


@pytest.mark.parametrize("float64", [True, False])
def test_verify_compares_without_compression_and_says_so(float64: bool) -> None:
    """In every precision; copies and levels are compared as they are."""
    overrides = [
        *SMALL,
        "parallel.data=4",
        "zero.replicas=2",
        "comm.hierarchy=two-level",
        "comm.compression=onebit",
    ]
    question = ask(Request.of(overrides), float64=float64)
    assert question.config.comm.compression == "none"
    assert (question.config.zero.replicas, question.config.comm.hierarchy) == (2, "two-level")
    assert "comm.compression onebit -> none (what is not sent must not hide a mistake)" in map(
        str, question.changes
    )


@pytest.mark.ranks(4, timeout=120)
def test_the_memory_of_compression_is_what_the_ranks_keep() -> None:
    for overrides in (
        ("comm.compression=onebit",),
        ("comm.compression=onebit", "comm.warmup=0"),
        ("comm.compression=topk", "zero.replicas=2"),
        ("comm.compression=twobit", "precision=fp64", "zero.replicas=2"),
    ):
        config = _config(*overrides)
        layout = layout_of(config, 4)
        mesh = mesh_of(config, layout, topology=Topology.single(4))
        trainer = Trainer(config, mesh, dataset=_dataset())
        held = sum(
            piece.values.nbytes
            for unit in trainer.parts.optimizer.residuals()
            for piece in unit.reduction.residuals()
        )
        elements = sum(parameter.numel() for parameter in trainer.parts.modules[0].parameters())
        most = int(all_reduce(torch.tensor(held), mesh.world, "max"))  # the last rank's part may be shorter
        assert residual_bytes(config, layout, elements) == pytest.approx(2 * most, rel=0.02)
        assert residual_bytes(_config(), layout, elements) == residual_bytes(config, Layout(), elements) == 0
        mesh.close()


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("comm.compression=onebit", 3), ("comm.compression=powersgd", 2)],
    ids=["onebit", "powersgd"],
)
def test_a_compressed_run_learns_and_resumes(kind: str, stage: int, tmp_path: Path) -> None:
    """Between two nodes, as long as it lasts, and from a checkpoint in the middle."""
    config = _config(
        *(kind, "comm.warmup=3", "comm.rank=1"),
        *(f"zero.stage={stage}", f"checkpoint.resume={tmp_path}/step-00000010"),
    )
    losses: list[float] = []
    for steps in (10, 5):
        mesh = mesh_of(config, layout_of(config, 4), topology=Topology.told(4, 2))
        trainer = Trainer(config, mesh, dataset=_dataset())
        if losses:
            resume(trainer, tmp_path, lambda text: None)
        assert trainer.step == len(losses)
        losses += [trainer.train_step().loss for _ in range(steps)]
        save(trainer, tmp_path, keep=0)
        crossed = mesh.ledger.total("data", "compressed_all_reduce", link="network")
        assert 0 < crossed.sent < 0.9 * crossed.bytes / 2  # plain: each rank sends its half of the node's sum
        mesh.close()
    assert losses[9] < losses[0] - 0.5
    assert losses[14] < losses[9]


def test_chunks_of_a_v_are_two_whatever_is_said() -> None:
    config = _config("parallel.pipeline=2", "parallel.schedule=zb-v", "parallel.chunks=3")
    [problem] = idle_over(config, Layout(pipeline=2))
    assert problem.text == (
        "`parallel.chunks: 3` has no effect because `parallel.schedule: zb-v` has 2 stages per rank"
    )
    for said in (1, 2):
        config = _config("parallel.pipeline=2", "parallel.schedule=zb-v", f"parallel.chunks={said}")
        assert list(idle_over(config, Layout(pipeline=2))) == []
