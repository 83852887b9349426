"""With keys and values kept, each token's logits equal those of a pass over the whole text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from packages.models.tests.reference import FAMILIES, MIXTURES, batch_of, build
from packages.models.tests.training import near
from torch import Tensor

from shardweave.comm import Axis, Mesh
from shardweave.models import Cache, Part, Transformer, TransformerConfig, cache_bytes, make_cache

TAKEN = {**FAMILIES, **{name: mixture for name, mixture in MIXTURES.items() if not mixture.expert_capacity}}
PIECES = ([8], [1] * 8, [3, 1, 4], [1, 5, 2])


def _unwritten(cache: Cache) -> Cache:
    """What is not written yet must not be seen."""
    for layer in cache.layers.values():
        layer.key.fill_(math.nan)
        layer.value.fill_(math.nan)
    return cache


@torch.no_grad()
def _expect_equal(config: TransformerConfig, tensor: Axis, ways: Sequence[list[int]] = PIECES) -> None:
    model = build(config, tensor=tensor).eval()
    tokens, _ = batch_of(config)
    whole = model.gather_logits(model(tokens))
    for pieces in ways:
        cache = _unwritten(make_cache([model], 3, 8))
        parts = [model.gather_logits(model(part, cache=cache)) for part in tokens.split(pieces, 1)]
        near(torch.cat(parts), whole, rtol=1e-12)
        assert cache.nbytes == cache_bytes(config, tensor.size, 3, 8, dtype=torch.float64)


@pytest.mark.parametrize("family", TAKEN)
def test_pieces_of_a_text_have_the_logits_of_the_whole(family: str) -> None:
    _expect_equal(TAKEN[family], Axis.single())


@pytest.mark.ranks(4)
def test_pieces_of_a_text_have_the_logits_of_the_whole_over_ranks() -> None:
    """Four ranks and two, which have two or one of the key heads, copies among them."""
    four, two = Mesh(tp=4).tp, Mesh(dp=2, tp=2).tp
    for config in TAKEN.values():
        _expect_equal(config, four, PIECES[-1:])
    for family in ("llama", "mixed"):
        _expect_equal(TAKEN[family], two, PIECES[-1:])


@torch.no_grad()
def test_parts_on_one_rank_share_a_cache() -> None:
    """As the stages of a V-shaped pipeline: the embedding alone, a block, and a block with the head."""
    for config in (FAMILIES["gpt2"], FAMILIES["llama"]):
        places = [Part(0, 0, embedding=True, head=False), Part(0, 1, False, False), Part(1, 2, False, True)]
        parts = [build(config, part=part).eval() for part in places]
        tokens, _ = batch_of(config)
        cache = make_cache(parts, 3, 8)
        assert list(cache.layers) == [0, 1]
        outputs = []
        for x in tokens.split([4, 1, 3], 1):
            for part in parts:
                x = part(x, cache=cache)
            outputs.append(x)
        near(torch.cat(outputs), build(config)(tokens), rtol=1e-12)


@torch.no_grad()
def test_positions_that_are_not_learned_go_on_beyond_the_sequence() -> None:
    for family in ("bloom", "llama", "parallel"):
        model = build(FAMILIES[family]).eval()
        tokens = batch_of(FAMILIES[family], sequence=13)[0]
        cache = make_cache([model], 3, 13)
        parts = [model(part, cache=cache) for part in tokens.split([6, 1, 5, 1], 1)]
        near(torch.cat(parts), model(tokens), rtol=1e-12)


@pytest.mark.parametrize("chunked_loss", [False, True])
@torch.no_grad()
def test_the_last_token_alone(chunked_loss: bool) -> None:
    model = build(FAMILIES["bloom"], chunked_loss=chunked_loss).eval()
    tokens, _ = batch_of(FAMILIES["bloom"])
    whole = model.logits(model(tokens))
    near(model.logits(model(tokens, last_only=True)), whole[-1:], rtol=1e-12)
    cache = make_cache([model], 3, 8)
    model(tokens[:, :5], cache=cache, last_only=True)
    near(model.logits(model(tokens[:, 5:], cache=cache, last_only=True)), whole[-1:], rtol=1e-12)


@torch.no_grad()
def test_bfloat16() -> None:
    for family in ("bloom", "mixed", "plain"):
        model = build(FAMILIES[family]).to(torch.bfloat16).eval()
        tokens, _ = batch_of(FAMILIES[family])
        cache = make_cache([model], 3, 8)
        assert cache.nbytes == cache_bytes(FAMILIES[family], 1, 3, 8, dtype=torch.bfloat16)
        parts = [model(part, cache=cache) for part in tokens.split([5, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts), model(tokens), rtol=0.1, atol=0.1)


def test_bytes_by_hand() -> None:
    """BLOOM-176B: 70 layers, 112 heads of 128; LLaMA-like keys that four of eight ranks share."""
    bloom = TransformerConfig(
        layers=70, hidden=14336, heads=112, vocab=250880, sequence=2048, position="alibi"
    )
    assert cache_bytes(bloom, 8, 4, 2048, dtype=torch.bfloat16) == 2 * 70 * 4 * 2048 * 14 * 128 * 2
    grouped = replace(bloom, heads=112, kv_heads=2)
    assert cache_bytes(grouped, 8, 1, 10) == 2 * 70 * 10 * 128 * 4
    assert cache_bytes(grouped, 1, 1, 10, part=Part(0, 3, embedding=True, head=False)) == 2 * 3 * 10 * 256 * 4


def _refused(
    model: Transformer,
    said: str,
    *,
    new: int = 2,
    cache: Cache | None = None,
    documents: Tensor | None = None,
) -> None:
    tokens = torch.zeros(3, new, dtype=torch.int64)
    cache = make_cache([model], 3, 8) if cache is None else cache
    with pytest.raises(ValueError, match=said), torch.no_grad():
        model(tokens, cache=cache, documents=documents)
    assert cache.embedded == 0
    assert all(layer.length == 0 for layer in cache.layers.values())


def test_what_a_cache_does_not_go_with_is_named() -> None:
    config = FAMILIES["gpt2"]
    model = build(config).eval()
    _refused(build(config).train(), r"cache: .*training mode.*eval\(\)")
    _refused(model, "cache: documents", documents=torch.zeros(3, 2, dtype=torch.int64))
    _refused(build(MIXTURES["switch"]).eval(), r"cache: expert_capacity 0\.75")
    _refused(model, "made for 2 rows, and the input has 3", cache=make_cache([model], 2, 8))
    _refused(model, "0 tokens are in it and 2 come, and it has room for 1", cache=make_cache([model], 3, 1))
    _refused(model, "nothing for layer 1", cache=make_cache([model.layers["0"]], 3, 8))
    _refused(build(config, part=Part(0, 0, True, False)), "made for 3 rows of 1 tokens", cache=Cache(3, 1))
    with pytest.raises(ValueError, match="layer 0 is there twice"):
        make_cache([model, model], 3, 8)
    with pytest.raises(ValueError, match="0 rows of 8 tokens"):
        make_cache([model], 0, 8)
    cache = make_cache([model], 3, 9)
    with torch.no_grad():
        model(batch_of(config)[0], cache=cache)
        with pytest.raises(ValueError, match="9 tokens, but there are learned positions for 8"):
            model(torch.zeros(3, 1, dtype=torch.int64), cache=cache)


@pytest.mark.ranks(2)
def test_sequences_that_are_cut_are_refused() -> None:
    config = FAMILIES["gpt2"]
    cut = build(config, tensor=Mesh(tp=2).tp, sequence_parallel=True).eval()
    _refused(cut, "cache: sequence_parallel=True cuts the sequence")
    _refused(build(config, context=Mesh(cp=2).cp).eval(), "cache: context=", new=4)
    with pytest.raises(ValueError, match="last_only: sequence_parallel=True"):
        cut(torch.zeros(3, 2, dtype=torch.int64), last_only=True)
