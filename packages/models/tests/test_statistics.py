"""What the parts put out, in every layout as in one process, each token once; in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build
from torch import Tensor, nn

from shardweave.comm import Mesh, TensorStatistics
from shardweave.models import Part, Transformer, watch, watched_parts

LEARNED = replace(FAMILIES["gpt2"], embedding_norm=True)
"""With every part that there may be."""


def whole_outputs(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """By hooks on the parts of a model that is whole and computes nothing twice."""
    found: dict[str, Tensor] = {}
    parts: dict[str, nn.Module] = dict(model.named_modules())
    hooks = [
        parts[name].register_forward_hook(lambda _, __, y, name=name: found.__setitem__(name, y.detach()))
        for name in watched_parts(model.config)
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def near(found: Mapping[str, TensorStatistics], right: Mapping[str, Tensor], times: int = 1) -> None:
    assert list(found) == list(right)
    for name, y in right.items():
        assert found[name].rms == pytest.approx(float(y.square().mean().sqrt()), rel=1e-10), name
        assert found[name].max == pytest.approx(float(y.abs().max()), rel=1e-10), name
        assert found[name].count == times * y.numel(), name


def trained(model: Transformer, *rows: slice) -> None:
    tokens, targets = batch_of(model.config)
    for some in rows or (slice(None),):
        model.loss(model(tokens[some]), targets[some]).backward()


def test_what_is_computed_again_counts_once_and_gradients_stay() -> None:
    right = whole_outputs(build(LEARNED), batch_of(LEARNED)[0])
    assert list(right) == ["embedding", "position", "embedding_norm", "layers.0", "layers.1", "norm"]
    plain = build(LEARNED)
    trained(plain, slice(2), slice(2, 3))
    for mode in ("none", "selective", "full", {"every": 2}, {"operations": ["attention", "norm"]}):
        model = build(LEARNED, recompute=mode)
        with watch(model) as watched:
            trained(model, slice(2), slice(2, 3))  # two micro-batches
        near(watched.statistics(), right)
        trained(model)  # nobody watches any more
        near(watched.statistics(), right)
        model.zero_grad()
        with watch(model):
            trained(model, slice(2), slice(2, 3))
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert one.grad is not None, name
            assert other.grad is not None, name
            assert torch.equal(one.grad, other.grad), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_are_seen() -> None:
    right = whole_outputs(build(LEARNED), batch_of(LEARNED)[0])
    torch.compiler.reset()
    model = build(LEARNED)
    model.compile_blocks(backend="eager")
    trained(model)
    with watch(model) as watched:
        trained(model)
    near(watched.statistics(), right)


def test_of_nothing_or_what_is_watched_already() -> None:
    model = Transformer(LEARNED, device="meta")
    with pytest.raises(ValueError, match="watch: 0 models"), watch():
        pass
    with pytest.raises(ValueError, match="watch: 2 models; give the stages"):
        watch(model, Transformer(FAMILIES["llama"], device="meta")).__enter__()
    with watch(model) as watched, pytest.raises(ValueError, match="watched already"):
        watch(model).__enter__()
    assert watched.statistics() == {}
    with pytest.raises(RuntimeError, match="out of luck"), watch(model):
        raise RuntimeError("out of luck")
    assert model.watched is None


@pytest.mark.ranks(4)
def test_every_layout_sees_what_one_process_sees() -> None:
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"tp": 4}, {}),
        ({"tp": 4}, {"sequence_parallel": True, "recompute": "full"}),
        ({"tp": 2, "cp": 2}, {"sequence_parallel": True, "chunked_loss": True}),
        ({"cp": 4}, {"context_form": "ring"}),
        ({"dp": 2, "tp": 2}, {}),
    ]
    for config in (LEARNED, FAMILIES["llama"]):
        right = whole_outputs(build(config), batch_of(config)[0])
        for sizes, options in layouts:
            mesh = Mesh.of(sizes)
            model = build(config, tensor=mesh.tp, context=mesh.cp, **options)
            tokens, _ = batch_of(config)
            mine = tokens[mesh.dp.rank :: mesh.dp.size]  # uneven: two rows, and one
            with watch(model) as watched:
                y = model(mine)
            (y.square().sum()).backward()
            before = mesh.ledger.total("world", "all_reduce").calls
            near(watched.statistics(mesh.world), right)
            assert mesh.ledger.total("world", "all_reduce").calls - before == 2
            mesh.close()


@pytest.mark.ranks(2)
def test_stages_of_a_pipeline_tell_each_other() -> None:
    """A rank may hold two parts; a tied head's copy of the embedding puts nothing out."""
    mesh = Mesh(pp=2)
    tokens, _ = batch_of(LEARNED)
    right = whole_outputs(build(LEARNED), tokens)
    ends = [Part(0, 1, embedding=True, head=False), Part(2, 2, embedding=False, head=True)]
    middle = Part(1, 2, embedding=False, head=False)
    with torch.no_grad():
        stages = [build(LEARNED, part=part) for part in (ends[0], middle, ends[1])]
        mine = [stages[0], stages[2]] if mesh.pp.is_first else [stages[1]]
        with watch(*mine) as watched:
            x = tokens
            for stage in stages:
                x = stage(x)
    near(watched.statistics(mesh.world), right)
