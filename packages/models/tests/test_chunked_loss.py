"""Head and loss in chunks, and layers that keep their gathered inputs, in the transformer: the same training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from packages.comm.tests.live import LiveBytes
from packages.models.tests.reference import FAMILIES, batch_of, build
from packages.models.tests.training import expect_equal_training, near

from shardweave.comm import Link, Links, Mesh, WeightGradients, gradient_work
from shardweave.models import Part, Transformer, TransformerConfig, generate
from shardweave.tensor_parallel import Overlap, ProductSpeed, head_loss

TIED, UNTIED = FAMILIES["gpt2"], FAMILIES["llama"]


@contextmanager
def small_chunks() -> Iterator[None]:
    """A few tokens' logits at a time: 24 tokens of 11 words are several chunks, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss, "_CHUNK_ON_CPU", 55)
        yield


def expect_equal_with(config: TransformerConfig, mesh: Mesh, **options: Any) -> None:
    whole, split = build(config), build(config, tensor=mesh.tp, context=mesh.cp, **options)
    tokens, _ = batch_of(config)
    near(split.gather_logits(split(tokens)), whole(tokens), "logits")
    expect_equal_training(whole, split)


def test_one_process_trains_as_with_all_logits() -> None:
    with small_chunks():
        for config in FAMILIES.values():
            expect_equal_with(config, Mesh(), chunked_loss=True)


@pytest.mark.ranks(2)
def test_two_ranks_train_as_one_process() -> None:
    mesh, split = Mesh(tp=2), {"sequence_parallel": True}
    with small_chunks():
        for config in (TIED, UNTIED):
            expect_equal_with(config, mesh, chunked_loss=True)
            for option in ("chunked_loss", "keep_inputs", "decomposed"):
                expect_equal_with(config, mesh, **split, **{option: True})
        for config in FAMILIES.values():
            expect_equal_with(
                config, mesh, **split, keep_inputs=True, decomposed=True, chunked_loss=config is TIED
            )


@pytest.mark.ranks(4)
def test_four_ranks_train_as_one_process() -> None:
    options = {"chunked_loss": True, "keep_inputs": True, "sequence_parallel": True}
    with small_chunks():
        for config in (TIED, UNTIED):
            expect_equal_with(config, Mesh(tp=4), **options)
            expect_equal_with(config, Mesh(tp=2, cp=2), **options)
            expect_equal_with(config, Mesh(cp=4), chunked_loss=True)


@pytest.mark.ranks(2)
def test_products_are_computed_in_pieces_where_that_is_predicted_to_pay() -> None:
    """Three of a block's products and collectives each way, and the head's; with the bytes of the plain way."""
    mesh = Mesh(tp=2)
    as_slow, fast = (
        ProductSpeed(0.0, 1e4),
        ProductSpeed(0.0, 1e12),
    )  # as slow as the links, and not worth hiding
    links = Links(Link(0.0, 1e3), Link(0.0, 1e3))
    tokens, targets = batch_of(TIED)
    found = []
    for config in (TIED, UNTIED):
        for decomposed in (False, True, Overlap(links, as_slow), Overlap(links, fast)):
            model = build(config, tensor=mesh.tp, sequence_parallel=True, decomposed=decomposed)
            model(tokens)  # lengths are compared at the first call
            mesh.ledger.reset()
            model.loss(model(tokens), targets).backward()
            sends, total = mesh.ledger.total(kind="send"), mesh.ledger.total()
            found.append((sends.calls, total.sent))
    sent = found[0][1]
    # Forward 4 of a block, backward 2, and the head's gather.
    assert [calls for calls, _ in found[:4]] == [0, 6 * TIED.layers + 1, 6 * TIED.layers + 1, 0]
    assert {bytes_ for _, bytes_ in found[:4]} == {sent}
    assert [calls for calls, _ in found[4:]] == [calls for calls, _ in found[:4]]


@pytest.mark.ranks(2)
def test_kept_inputs_are_not_gathered_again() -> None:
    """Sequence parallelism sends 10 parts of an activation a block, and 8 where inputs are kept; the head's two."""
    mesh = Mesh(tp=2)
    tokens, targets = batch_of(TIED)
    sent: dict[tuple[bool, bool], tuple[int, int]] = {}
    for keep_inputs in (False, True):
        for chunked_loss in (False, True):
            model = build(
                TIED,
                tensor=mesh.tp,
                sequence_parallel=True,
                keep_inputs=keep_inputs,
                chunked_loss=chunked_loss,
            )
            model(tokens)  # the first call compares lengths and tokens, too
            mesh.ledger.reset()
            model.loss(model(tokens), targets).backward()
            gathered, reduced = (mesh.ledger.total(kind=kind) for kind in ("all_gather", "reduce_scatter"))
            assert gathered.elements == gathered.calls * tokens.numel() * TIED.hidden
            sent[keep_inputs, chunked_loss] = gathered.calls, reduced.calls
    layers = TIED.layers
    # Of a block: forward 2 and backward 2 of the row products, and 2 of the column products' inputs. The embedding's
    # backward gathers what its forward scattered; the head's forward gathers, and its backward if nothing was kept.
    gathers = 6 * layers + 2
    assert sent[False, False] == (gathers + 1, 4 * layers + 2)
    assert sent[True, False] == (gathers - 2 * layers, 4 * layers + 2)
    assert sent[False, True] == (gathers + 1, 4 * layers + 2)
    assert sent[True, True] == (gathers + 1 - 2 * layers, 4 * layers + 2)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_the_heads_gradient_can_be_put_off(config: TransformerConfig) -> None:
    """A stage of a pipeline that defers weight gradients: the head's is made when its turn comes."""
    part = Part(1, 2, embedding=False, head=True)
    _, targets = batch_of(config)
    hidden = torch.randn(8, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plain, stage = build(config, part=part), build(config, part=part, chunked_loss=True)
    right, x = (hidden.clone().requires_grad_() for _ in range(2))
    expected = plain.loss(plain(right), targets)
    expected.backward()
    queue = WeightGradients()
    for parameter in stage.parameters():
        gradient_work(parameter).queue = queue
    head = stage.embedding.weight if config.tie_embeddings else stage.head.weight
    with small_chunks():
        loss = stage.loss(stage(x), targets)
        loss.backward()
        assert head.grad is None
        queue.run()
    near(loss, expected, "loss")
    near(x.grad, right.grad, "input")
    for (name, found), wanted in zip(stage.named_parameters(), plain.parameters(), strict=True):
        near(found.grad, wanted.grad, name)


def test_evaluation_and_generation_are_the_same() -> None:
    tokens, targets = batch_of(UNTIED)
    plain, chunked = build(UNTIED).eval(), build(UNTIED, chunked_loss=True).eval()
    with torch.no_grad():
        near(chunked.loss(chunked(tokens), targets), plain.loss(plain(tokens), targets))
        assert chunked(tokens).shape == (8, 3, 16)
        near(chunked.logits(chunked(tokens)), plain(tokens))
        assert plain.logits(plain(tokens)).shape == (8, 3, 11)
    assert torch.equal(generate(chunked, tokens, 5), generate(plain, tokens, 5))


def test_b019_no_valid_label_is_a_loss_of_zero() -> None:
    model = build(TIED, chunked_loss=True)
    tokens, targets = batch_of(TIED)
    loss = model.loss(model(tokens), torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_b026_an_odd_vocabulary_is_not_padded() -> None:
    model = build(TIED, tensor=Mesh(tp=2).tp, chunked_loss=True)
    torch.nn.init.zeros_(model.embedding.weight)
    tokens, targets = batch_of(TIED)
    each = model.loss(model(tokens), targets) / (targets != -100).sum()
    assert each.item() == pytest.approx(2.397895, abs=1e-6)  # ln 11


@pytest.mark.ranks(2)
def test_targets_of_another_shape_are_named() -> None:
    tokens, targets = batch_of(TIED)
    model = Transformer(TIED, tensor=Mesh(tp=2).tp, sequence_parallel=True, chunked_loss=True)
    with pytest.raises(
        ValueError, match=r"hidden states of shape \(4, 3, 16\): targets are \[b, s\] .*\[s / 2, b, h\]"
    ):
        model.loss(model(tokens), targets[:, 1:])


def test_a_step_never_holds_all_logits() -> None:
    """Tokens times vocabulary are 2 of a step's largest tensors, the logits and their gradient."""
    config = TransformerConfig(
        layers=1,
        hidden=8,
        heads=1,
        vocab=50_000,
        sequence=1024,
        position="rotary",
        norm="rmsnorm",
        bias=False,
    )
    tokens = torch.arange(2048).view(2, 1024)
    logits = tokens.numel() * config.vocab * 4
    peaks = []
    for chunked_loss in (False, True):
        model = Transformer(config, chunked_loss=chunked_loss)
        live = LiveBytes(float("inf"))
        with live:
            model.loss(model(tokens), tokens).backward()
        peaks.append(live.peak)
    assert peaks[0] >= 2 * logits
    assert peaks[1] < logits / 4
