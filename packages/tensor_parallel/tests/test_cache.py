"""Attention that is given a text in pieces, with a cache, equals attention that is given all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from packages.tensor_parallel.tests.reference import F64, assert_near, values
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh
from shardweave.tensor_parallel import LayerCache, ParallelAttention, Rotary, RotaryScaling

LENGTH = 9
PIECES = ([9], [1] * 9, [4, 1, 3, 1], [1, 5, 2, 1])
"""New tokens of each call: all at once, one by one, several behind many, and several behind one."""

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"rotary": True},
    {"alibi": True},
    {"rotary": True, "qk_norm": True, "batch_first": True},
)


def _norm(size: int) -> nn.Module:
    made = nn.RMSNorm(size, eps=1e-5, dtype=F64)
    nn.init.normal_(made.weight)
    return made


def _layer(
    axis: Axis, kv_heads: int, *, rotary: bool = False, qk_norm: bool = False, **options: Any
) -> ParallelAttention:
    scaled = RotaryScaling(kind="linear", factor=2.0)
    torch.manual_seed(4)
    made = ParallelAttention(
        6,
        8,
        axis,
        kv_heads=kv_heads,
        head_dim=4,
        rotary=Rotary(4, fraction=0.5, scaling=scaled) if rotary else None,
        qk_norm=_norm if qk_norm else None,
        dtype=F64,
        **options,
    )
    return made.eval()


@torch.no_grad()
def _expect_equal(layer: ParallelAttention) -> None:
    x = values(LENGTH, 3, 6)
    if layer.sequence == 1:
        x = x.transpose(0, 1)
    expected = layer(x)
    for pieces in PIECES:
        cache = layer.new_cache(3, LENGTH + 2)
        for kept in (cache.key, cache.value):  # what is not written yet must not be seen
            kept.fill_(math.nan)
        memory = cache.key.data_ptr(), cache.value.data_ptr()
        parts = [layer(part, cache=cache) for part in x.split(pieces, layer.sequence)]
        assert_near(torch.cat(parts, layer.sequence), expected)
        assert cache.length == LENGTH
        assert (cache.key.data_ptr(), cache.value.data_ptr()) == memory
        assert cache.key[:, :, LENGTH:].isnan().all()


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_pieces_of_a_text_equal_the_whole(kv_heads: int) -> None:
    for kind in KINDS:
        _expect_equal(_layer(Axis.single(), kv_heads, **kind))


@pytest.mark.ranks(4)
def test_pieces_of_a_text_equal_the_whole_over_ranks() -> None:
    """With fewer key heads than ranks, too: each rank keeps the one that its queries look at."""
    axis = Mesh(tp=4).tp
    for kv_heads in (1, 2, 8):
        for kind in KINDS:
            layer = _layer(axis, kv_heads, **kind)
            _expect_equal(layer)
            here = max(kv_heads // 4, 1)
            assert layer.new_cache(3, 5).nbytes == 2 * 3 * here * 5 * 4 * 8


@torch.no_grad()
def test_a_text_and_its_training_may_take_turns() -> None:
    """Masks and angles are shared by layers and kept: neither use may leave the other something it cannot use."""
    for kind in KINDS[:3]:
        layer = _layer(Axis.single(), 8, **kind)
        x = values(LENGTH, 3, 6)
        with torch.inference_mode():
            cache = layer.new_cache(3, LENGTH)
            layer(x[:4], cache=cache)
            layer(x[4:6], cache=cache)
        with torch.enable_grad():
            layer(x[:6]).sum().backward()
            layer(x[:2]).sum().backward()
        assert_near(layer(x[6:], cache=cache), layer(x)[6:])
        if layer.alibi is not None:
            assert len(layer.alibi._cache) == 1


@torch.no_grad()
def test_bfloat16() -> None:
    layer = _layer(Axis.single(), 2, alibi=True).to(torch.bfloat16)
    x = values(LENGTH, 3, 6).to(torch.bfloat16)
    cache = layer.new_cache(3, LENGTH)
    parts = [layer(part, cache=cache) for part in x.split([4, 1, 4])]
    torch.testing.assert_close(torch.cat(parts), layer(x), rtol=0.05, atol=0.02)
    assert cache.key.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"positions": torch.arange(3)}, "cache: positions are given"),
        ({"keys": torch.zeros(3, 2, dtype=torch.int32)}, "cache: keys of dropout are given"),
        ({"documents": torch.zeros(2, 3, dtype=torch.int64)}, "cache: documents are given"),
    ],
)
@torch.no_grad()
def test_what_a_cache_does_not_go_with_is_named(given: dict[str, Tensor], said: str) -> None:
    layer = _layer(Axis.single(), 8)
    with pytest.raises(ValueError, match=said):
        layer(values(3, 2, 6), cache=layer.new_cache(2, 5), **given)


def test_what_does_not_fit_is_named_and_leaves_the_cache_alone() -> None:
    layer = _layer(Axis.single(), 8)
    x = values(3, 2, 6)
    cache = layer.new_cache(2, 5)
    with pytest.raises(ValueError, match=r"cache: .*torch.no_grad\(\)"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"cache: the layer is in training mode.*eval"):
            layer.train()(x, cache=cache)
        layer.eval()
        assert cache.length == 0
        layer(x, cache=cache)
        with pytest.raises(ValueError, match="3 tokens are in it and 3 come, and it has room for 5"):
            layer(x, cache=cache)
        with pytest.raises(ValueError, match="made for 2 rows, and the input has 1"):
            layer(x[:, :1], cache=cache)
        with pytest.raises(ValueError, match="no token comes"):
            layer(x[:0], cache=cache)
        with pytest.raises(ValueError, match=r"holds torch\.float32 and the layer computes torch\.float64"):
            layer(x, cache=layer.new_cache(2, 5, dtype=torch.float32))
        with pytest.raises(
            ValueError, match="made for 4 key/value heads of 4 features, and this layer has 8 of 4"
        ):
            layer(x, cache=LayerCache(2, 4, 5, 4, dtype=F64))
        with pytest.raises(ValueError, match="causal=False"):
            _layer(Axis.single(), 8, causal=False)(x, cache=cache)
    assert cache.length == 3
    with pytest.raises(ValueError, match="capacity: a cache of 0"):
        layer.new_cache(2, 0)


@pytest.mark.ranks(2)
def test_sequences_that_are_cut_are_refused() -> None:
    mesh = Mesh(tp=2)
    cut = _layer(mesh.tp, 8, sequence_dim=0)
    with pytest.raises(ValueError, match="cache: sequence parallelism"), torch.no_grad():
        cut(values(2, 2, 6), cache=cut.new_cache(2, 5))
    cut = _layer(Axis.single(), 8, context=Mesh(cp=2).cp)
    with pytest.raises(ValueError, match="cache: context="), torch.no_grad():
        cut(values(2, 2, 6), cache=cut.new_cache(2, 5))
