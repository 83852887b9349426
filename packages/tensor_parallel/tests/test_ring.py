"""Both forms of attention over a cut sequence against the whole one, written out in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from packages.tensor_parallel.tests.reference import F64, assert_near, values
from torch import Tensor

from shardweave.comm import Axis, DropoutStreams, Mesh, combine_keys, keyed_dropout
from shardweave.tensor_parallel import alibi_slopes, cut_context, softmax_lse, ulysses
from shardweave.tensor_parallel.core import Scoring
from shardweave.tensor_parallel.ring import ring_attention, ring_steps
from shardweave.tensor_parallel.ulysses import exchanged_attention, local_attention

HEADS, BATCH, SIZE = 4, 2, 3
Form = Callable[[Tensor, Tensor, Tensor, Scoring, Axis], Tensor]


forms = pytest.mark.parametrize("form", ["operator", "plain"])
"""With torch's private operator, and without it."""


@contextmanager
def using(form: str) -> Iterator[None]:
    """In the ranks, which a fixture would not reach."""
    with pytest.MonkeyPatch.context() as patch:
        if form == "plain":
            for module in (softmax_lse, ulysses):
                patch.setattr(module, "private_operator", lambda device, dtype: None)
        assert (softmax_lse.private_operator("cpu", F64) is None) == (form == "plain")
        yield


def scorings(length: int) -> list[Scoring]:
    documents = torch.tensor([[0] * 5 + [1] * (length - 5), [3] + [2] * (length - 2) + [9]])
    streams = DropoutStreams(seed=1, step=5, samples=torch.tensor([8, 3]))
    keys = streams.keys(2, "attention", torch.arange(length))
    slopes = alibi_slopes(HEADS)
    shifted = torch.arange(length) * 2 + 1
    return [
        Scoring(),
        Scoring(causal=False),
        Scoring(slopes=slopes),
        Scoring(slopes=slopes, causal=False, positions=shifted),
        Scoring(documents=documents),
        Scoring(documents=documents, causal=False, slopes=slopes),
        Scoring(dropout=0.3, keys=keys),
        Scoring(dropout=0.3, keys=keys, slopes=slopes, documents=documents, first_head=5),
    ]


def whole_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Every head on its own, all scores at once."""
    length, outputs = q.shape[2], []
    index = torch.arange(length)
    places = (index if scoring.positions is None else scoring.positions).double()
    for head in range(q.shape[1]):
        other = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, other].transpose(1, 2) / math.sqrt(q.shape[-1])
        if scoring.slopes is not None:
            scores = scores + scoring.slopes[head] * (places.unsqueeze(0) - places.unsqueeze(1))
        if scoring.causal:
            scores = scores.masked_fill(index.unsqueeze(0) > index.unsqueeze(1), -math.inf)
        if scoring.documents is not None:
            apart = scoring.documents.unsqueeze(1) != scoring.documents.unsqueeze(2)
            scores = scores.masked_fill(apart, -math.inf)
        weights = scores.softmax(-1)
        if scoring.keys is not None:
            masks = combine_keys(scoring.keys.t(), torch.tensor(head + scoring.first_head))
            weights = keyed_dropout(weights, scoring.dropout, masks)
        outputs.append(weights @ v[:, other])
    return torch.stack(outputs, 1)


def expect_equal(attention: Form, scoring: Scoring, axis: Axis, length: int, kv_heads: int) -> None:
    whole = [values(BATCH, n, length, SIZE, seed=n + i) for i, n in enumerate((HEADS, kv_heads, kv_heads))]
    weights = values(BATCH, HEADS, length, SIZE, seed=9)
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    expected = whole_attention(leaves[0], leaves[1], leaves[2], scoring)
    (expected * weights).sum().backward()
    own = [cut_context(tensor, axis, 2).clone().requires_grad_() for tensor in whole]
    found = attention(own[0], own[1], own[2], scoring, axis)
    (found * cut_context(weights, axis, 2)).sum().backward()
    assert_near(found.detach(), cut_context(expected.detach(), axis, 2), "output")
    for name, mine, theirs in zip(("dq", "dk", "dv"), own, leaves, strict=True):
        assert theirs.grad is not None
        assert_near(mine.grad, cut_context(theirs.grad, axis, 2), f"{name} of {scoring}")


@forms
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_b031_the_ring_equals_one_process(ranks: int, form: str) -> None:
    axis = Mesh(cp=ranks).cp
    with using(form):
        for length, kv_heads in ((8, 4), (8, 1), (24, 2)):
            for scoring in scorings(length):
                expect_equal(ring_attention, scoring, axis, length, kv_heads)


@forms
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_exchanging_heads_for_tokens_equals_one_process(ranks: int, form: str) -> None:
    axis = Mesh(cp=ranks).cp
    with using(form):
        for kv_heads in (4, 2, 1):
            for scoring in scorings(8 * kv_heads):
                expect_equal(exchanged_attention, scoring, axis, 8 * kv_heads, kv_heads)


@forms
def test_on_one_rank_it_is_the_core_of_any_length(form: str) -> None:
    def local(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, axis: Axis) -> Tensor:
        return local_attention(q, k, v, scoring)

    with using(form):
        for attention in (ring_attention, exchanged_attention, local):
            for scoring in scorings(7):
                expect_equal(attention, scoring, Axis.single("cp"), 7, 2)


def test_the_steps_are_the_picture() -> None:
    def pieces(ranges: tuple[range, ...]) -> str:
        return " ".join(str(part.start // 2) for part in ranges)

    found = [
        f"rank {step.source}: {pieces(step.queries)} see {pieces(step.keys)}"
        for step in ring_steps(16, 4, 1, causal=True)
    ]
    assert found == [
        "rank 1: 1 6 see 1 6",
        "rank 0: 1 6 see 0",
        "rank 3: 6 see 3 4",
        "rank 2: 6 see 2 5",
    ]


def test_every_pair_meets_once_and_ranks_have_the_same_work() -> None:
    for ranks in (1, 2, 3, 4):
        length = 4 * ranks
        met = torch.zeros(length, length, dtype=torch.int64)
        work = set()
        for rank in range(ranks):
            steps = ring_steps(length, ranks, rank, causal=True)
            work.add(sum(step.num_queries * step.num_keys for step in steps))
            for step in steps:
                for row in (place for part in step.queries for place in part):
                    for part in step.keys:
                        met[row, part.start : part.stop] += 1
        assert len(work) == 1
        assert (met.tril() == torch.ones(length, length).tril()).all()
        assert met.max() == 1


@pytest.mark.ranks(4)
def test_messages_and_bytes() -> None:
    mesh = Mesh(cp=4)
    q, k, v = (values(BATCH, n, 2, SIZE).float().requires_grad_() for n in (4, 2, 2))
    out = ring_attention(q, k, v, Scoring(), mesh.cp)
    sent = mesh.ledger.total(kind="send")
    assert (sent.calls, sent.bytes) == (3, 3 * 2 * k.numel() * 4)
    out.sum().backward()
    sent = mesh.ledger.total(kind="send")
    assert (sent.calls, sent.bytes) == (10, 10 * 2 * k.numel() * 4)
    exchanged_attention(q, k, v, Scoring(), mesh.cp).sum().backward()
    assert mesh.ledger.total(kind="all_to_all").calls == 4


@pytest.mark.ranks(4)
def test_gradients_of_keys_travel_wider_than_16_bits() -> None:
    mesh = Mesh(cp=4)
    whole = [values(1, 2, 64, 8, seed=seed) for seed in (1, 2, 3)]
    exact = [tensor.to(torch.bfloat16).double().requires_grad_() for tensor in whole]
    whole_attention(exact[0], exact[1], exact[2], Scoring()).sum().backward()
    own = [cut_context(tensor.to(torch.bfloat16), mesh.cp, 2).requires_grad_() for tensor in whole]
    ring_attention(own[0], own[1], own[2], Scoring(), mesh.cp).sum().backward()
    for mine, theirs in zip(own, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        reference = cut_context(theirs.grad, mesh.cp, 2)
        assert (mine.grad.double() - reference).abs().max() < 0.02 * theirs.grad.abs().max()
    message = 2 * own[1].numel()  # keys and values: three times in each direction in 2 bytes, four times in 4
    assert mesh.ledger.total(kind="send").bytes == message * (6 * 2 + 4 * 4)


@pytest.mark.ranks(4)
def test_what_cannot_be_shared_is_refused_before_any_message() -> None:
    mesh = Mesh(cp=4)
    q = torch.zeros(1, 6, 2, 2)
    with pytest.raises(ValueError, match=r"4 ranks of context axis 'cp' some of the 6 heads.*, or the ring"):
        exchanged_attention(q, q, q, Scoring(), mesh.cp)
    with pytest.raises(ValueError, match=r"sequence of 4 tokens .* multiple of 8"):
        ring_attention(q[:, :, :1], q[:, :, :1], q[:, :, :1], Scoring(), mesh.cp)
    assert mesh.ledger.total().calls == 0


def test_scoring_of_some_heads() -> None:
    scoring = Scoring(slopes=alibi_slopes(4), first_head=8)
    assert scoring.of_heads(2, 2) == replace(scoring, slopes=alibi_slopes(4)[2:], first_head=10)
    mask = scoring.of_heads(1, 1).block(
        torch.zeros(1, 1, 2, 3, dtype=F64), [range(2, 4)], [range(2)], overlap=False
    )
    assert mask.mask is not None
    assert_near(mask.mask[0, 0], alibi_slopes(4)[1] * torch.tensor([[-2.0, -1.0], [-3.0, -2.0]], dtype=F64))
