"""Attention by heads against attention written out in one process."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal

import pytest
import torch
from packages.tensor_parallel.tests.reference import (
    F64,
    assert_near,
    assert_parameters_equal,
    assert_same_training,
    on_ranks,
    part,
    values,
    whole,
)
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, DropoutStreams, Mesh, combine_keys, keyed_dropout
from shardweave.tensor_parallel import (
    Alibi,
    ParallelAttention,
    Rotary,
    alibi_slopes,
    assert_replicas_equal,
    cut_context,
    gather_context,
)


def norm(size: int) -> nn.Module:
    made = nn.RMSNorm(size, eps=1e-5, dtype=F64)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(0.5, 1.5, size))
    return made


class Reference(nn.Module):
    """Attention as in a textbook: every head on its own, ``[b, s, h]``."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        alibi: bool,
        rotary: Rotary | None,
        causal: bool,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.alibi, self.rotary, self.causal = alibi, rotary, causal
        self.query = nn.Linear(hidden, heads * head_dim, dtype=F64)
        self.key = nn.Linear(hidden, kv_heads * head_dim, dtype=F64)
        self.value = nn.Linear(hidden, kv_heads * head_dim, dtype=F64)
        self.output = nn.Linear(heads * head_dim, hidden, dtype=F64)
        self.query_norm, self.key_norm = (norm(head_dim) if qk_norm else None for _ in range(2))

    def forward(self, x: Tensor, keep: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        length, mixed = x.shape[1], []
        distance = torch.arange(length, dtype=F64) - torch.arange(length, dtype=F64).unsqueeze(1)
        for head in range(self.heads):
            other = head * self.kv_heads // self.heads
            query = self.query(x)[..., head * self.head_dim : (head + 1) * self.head_dim]
            key = self.key(x)[..., other * self.head_dim : (other + 1) * self.head_dim]
            value = self.value(x)[..., other * self.head_dim : (other + 1) * self.head_dim]
            if self.query_norm is not None and self.key_norm is not None:
                query, key = self.query_norm(query), self.key_norm(key)
            if self.rotary is not None:
                query, key = self.rotary(query), self.rotary(key)
            scores = query @ key.transpose(1, 2) / math.sqrt(self.head_dim)
            if self.alibi:
                scores = scores + alibi_slopes(self.heads)[head] * distance
            if self.causal:
                scores = scores.masked_fill(distance > 0, -math.inf)
            if documents is not None:
                scores = scores.masked_fill(documents.unsqueeze(1) != documents.unsqueeze(2), -math.inf)
            weights = scores.softmax(-1)
            if keep is not None:
                weights = weights * keep[:, head]
            mixed.append(weights @ value)
        y: Tensor = self.output(torch.cat(mixed, dim=-1))
        return y


def pair(
    axis: Axis,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 4,
    alibi: bool = False,
    rotary: bool = False,
    causal: bool = True,
    dropout: float = 0.0,
    sequence_dim: int | None = None,
    batch_first: bool = False,
    qk_norm: bool = False,
    context: Axis | None = None,
    context_form: Literal["ring", "all-to-all"] = "ring",
) -> tuple[ParallelAttention, Reference]:
    turns = Rotary(head_dim) if rotary else None
    torch.manual_seed(3)
    reference = Reference(
        6, heads, kv_heads, head_dim, alibi=alibi, rotary=turns, causal=causal, qk_norm=qk_norm
    )
    torch.manual_seed(3)
    split = ParallelAttention(
        6,
        heads,
        axis,
        kv_heads=kv_heads,
        head_dim=head_dim,
        alibi=alibi,
        rotary=turns,
        causal=causal,
        dropout=dropout,
        sequence_dim=sequence_dim,
        batch_first=batch_first,
        qk_norm=norm if qk_norm else None,
        context=context,
        context_form=context_form,
        dtype=F64,
    )
    return split, reference


def compare(
    split: ParallelAttention,
    reference: Reference,
    axis: Axis,
    *,
    documents: Tensor | None = None,
    keys: Tensor | None = None,
    keep: Tensor | None = None,
    steps: int = 2,
) -> None:
    length = 16 if split.context.size > 1 else 12
    x, weights = values(2, length, 6), values(2, length, 6, seed=2)
    dim = split.query.sequence_dim

    def laid_out(tensor: Tensor) -> Tensor:
        sequence_first = tensor if split.sequence == 1 else tensor.transpose(0, 1)
        return part(cut_context(sequence_first, split.context, split.sequence), axis, dim)

    def together(tensor: Tensor) -> Tensor:
        return gather_context(whole(tensor, axis, dim), split.context, split.sequence)

    def split_step() -> Tensor:
        own = laid_out(x).clone().requires_grad_()
        y = split(own, documents=documents, keys=keys)
        (y * laid_out(weights)).sum().backward()
        assert own.grad is not None
        both = torch.stack([together(y.detach()), together(own.grad)])
        return both if split.sequence == 1 else both.transpose(1, 2)

    def reference_step() -> Tensor:
        own = x.clone().requires_grad_()
        y = reference(own, keep, documents)
        (y * weights).sum().backward()
        assert own.grad is not None
        return torch.stack([y.detach(), own.grad])

    assert_same_training(split, reference, axis, split_step, reference_step, steps=steps)
    assert_replicas_equal(split, axis)


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_trains_like_attention_in_one_process(ranks: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=ranks).tp
    kinds: list[dict[str, Any]] = [
        {},
        {"causal": False},
        {"rotary": True},
        {"alibi": True},
        {"alibi": True, "causal": False},
    ]
    for options in kinds:
        split, reference = pair(axis, 12, 12, sequence_dim=sequence_dim, **options)
        compare(split, reference, axis)


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_batch_first(ranks: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=ranks).tp
    split, reference = pair(axis, 12, 12, rotary=True, sequence_dim=sequence_dim, batch_first=True)
    compare(split, reference, axis)


@on_ranks
def test_grouped_queries(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for heads, kv_heads in ((12, 12), (24, 12), (12, ranks), (12, 1)):
        split, reference = pair(axis, heads, kv_heads, rotary=True)
        compare(split, reference, axis)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_b024_key_value_heads_fewer_than_ranks(kv_heads: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=4).tp
    split, reference = pair(axis, 4, kv_heads, alibi=True, sequence_dim=sequence_dim)
    compare(split, reference, axis)  # outputs, summed gradients, norm, and bit-equal copies after two steps
    record = comm.sharding_of(split.key.weight)
    assert record.shape == (kv_heads * 4, 6)
    assert record.splits[0].copy == axis.rank % (4 // kv_heads)
    # one key tensor goes into a checkpoint, from the ranks that hold the first copy, and loads into one process
    pieces = comm.all_gather(split.key.weight.detach(), axis)
    one = pieces.view(kv_heads, 4 // kv_heads, 4, 6)[:, 0].reshape(kv_heads * 4, 6)
    alone, _ = pair(Axis.single(), 4, kv_heads, alibi=True)
    alone.load_state_dict(reference.state_dict())
    assert_near(alone.key.weight.detach(), one)
    assert_parameters_equal(split, alone)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("heads", [6, 7])
def test_heads_that_do_not_divide_are_refused_with_what_would(heads: int) -> None:
    axis = Mesh(tp=4).tp
    valid = {6: "1, 2, 3, 6", 7: "1, 7"}[heads]
    with pytest.raises(
        ValueError, match=rf"{heads} heads do not divide over axis 'tp' of 4 ranks; use one of {valid} ranks"
    ):
        ParallelAttention(heads * 2, heads, axis)
    with pytest.raises(
        ValueError, match=r"12 heads with 3 key/value heads do not divide.*use one of 1, 3, 6, 12 ranks"
    ):
        ParallelAttention(24, 12, axis, kv_heads=3)


def test_contradicting_options_are_named() -> None:
    axis = Axis.single()
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key/value heads"):
        ParallelAttention(12, 6, axis, kv_heads=4)
    with pytest.raises(ValueError, match="5 heads do not divide hidden size 12"):
        ParallelAttention(12, 5, axis)
    with pytest.raises(ValueError, match=r"sequence_dim 1: in \[s, b, h\] the sequence is dim 0"):
        ParallelAttention(12, 6, axis, sequence_dim=1)
    with pytest.raises(ValueError, match="ALiBi is for 4 heads, this layer has 6"):
        ParallelAttention(12, 6, axis, alibi=Alibi(4))
    with pytest.raises(ValueError, match="rotary is for heads of 4 features, these have 2"):
        ParallelAttention(12, 6, axis, rotary=Rotary(4))
    with pytest.raises(ValueError, match=r"dropout 1.5 is not in \[0, 1\)"):
        ParallelAttention(12, 6, axis, dropout=1.5)
    with pytest.raises(ValueError, match="keys=DropoutStreams"):
        ParallelAttention(12, 6, axis, dropout=0.1)(torch.ones(3, 2, 12))


@on_ranks
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"alibi": True}, {"rotary": True}])
def test_dropout_masks_do_not_depend_on_the_layout(ranks: int, options: dict[str, Any]) -> None:
    axis = Mesh(tp=ranks).tp
    for kv_heads in (12, ranks):
        split, reference = pair(axis, 12, kv_heads, dropout=0.3, sequence_dim=0, **options)
        x = values(2, 12, 6)
        keys = DropoutStreams(seed=1, step=5, samples=torch.tensor([8, 3])).keys(
            2, "attention", torch.arange(12)
        )
        masks = combine_keys(keys.t().unsqueeze(1), torch.arange(12).view(1, 12, 1))  # [b, heads, s]
        keep = keyed_dropout(torch.ones(2, 12, 12, 12, dtype=F64), 0.3, masks)
        assert 0.6 < (keep > 0).double().mean() < 0.8
        y = whole(split(part(x.transpose(0, 1), axis, 0), keys=keys), axis, 0)
        assert_near(y.transpose(0, 1), reference(x, keep))
        split.eval()  # evaluation masks nothing and needs no keys
        y = whole(split(part(x.transpose(0, 1), axis, 0)), axis, 0)
        assert_near(y.transpose(0, 1), reference(x))


@pytest.mark.parametrize("alibi", [False, True])
def test_positions_of_several_documents_in_one_sequence(alibi: bool) -> None:
    split, _ = pair(Axis.single(), 4, 2, rotary=not alibi, alibi=alibi)
    x = values(6, 1, 6)
    default = split(x)
    torch.testing.assert_close(split(x, positions=torch.arange(6) + 100), default, rtol=1e-9, atol=1e-9)
    assert (split(x, positions=torch.tensor([0, 1, 2, 0, 1, 2])) - default).abs().max() > 1e-4


@pytest.mark.parametrize("alibi", [False, True])
def test_low_precision_stays_near_the_exact_result(alibi: bool) -> None:
    split, _ = pair(Axis.single(), 4, 2, alibi=alibi)
    x = values(16, 2, 6)
    exact = split(x)
    found = split.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.ranks(2)
def test_one_collective_forward_and_one_backward() -> None:
    mesh = Mesh(tp=2)
    split, _ = pair(mesh.tp, 4, 2)
    x = values(6, 2, 6).requires_grad_()
    split(x).sum().backward()
    total = mesh.ledger.total(kind="all_reduce")
    assert (total.calls, total.bytes) == (2, 2 * x.numel() * 8)
    assert mesh.ledger.total().calls == 2


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_norms_of_queries_and_keys(ranks: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=ranks).tp
    for kv_heads in (12, 1) if ranks in (1, 4) else (12,):
        split, reference = pair(axis, 12, kv_heads, rotary=True, qk_norm=True, sequence_dim=sequence_dim)
        compare(split, reference, axis)


@on_ranks
def test_documents_do_not_see_each_other(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    documents = torch.tensor([[0] * 5 + [1] * 7, [7] * 11 + [3]])
    kinds: list[dict[str, Any]] = [{"rotary": True}, {"alibi": True, "sequence_dim": 0}, {"causal": False}]
    for options in kinds:
        split, reference = pair(axis, 12, 12, **options)
        compare(split, reference, axis, documents=documents, steps=1)
    split, _ = pair(axis, 12, 12, rotary=True)
    x = values(12, 2, 6)
    together = split(x, documents=documents)
    assert_near(together[5:, :1], split(x[5:, :1]), "the second document alone, at other positions")
    with pytest.raises(ValueError, match=r"documents of shape \(2, 6\) for rows of shape \(2, 12\)"):
        split(x, documents=documents[:, :6])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ["ring", "all-to-all"])
def test_context_equals_one_process(form: Literal["ring", "all-to-all"]) -> None:
    """Both axes at once and each alone; outputs, all gradients, steps and copies."""
    documents = torch.tensor([[0] * 5 + [1] * 11, [7] * 11 + [3] * 5])
    keys = DropoutStreams(seed=1, step=5, samples=torch.tensor([8, 3])).keys(2, "attention", torch.arange(16))
    masks = combine_keys(keys.t().unsqueeze(1), torch.arange(8).view(1, 8, 1))
    keep = keyed_dropout(torch.ones(2, 8, 16, 16, dtype=F64), 0.3, masks)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (8, {"rotary": True}),
        (2, {"rotary": True, "qk_norm": True, "batch_first": True}),
        (1, {"alibi": True, "causal": False}),
        (2, {"alibi": True, "dropout": 0.3}),
    ]
    for mesh, sequence_parallel in ((Mesh(cp=4), False), (Mesh(cp=2, tp=2), False), (Mesh(cp=2, tp=2), True)):
        for (kv_heads, options), texts in product(kinds, (None, documents)):
            dim = (1 if "batch_first" in options else 0) if sequence_parallel else None
            split, reference = pair(
                mesh.tp, 8, kv_heads, context=mesh.cp, context_form=form, sequence_dim=dim, **options
            )
            dropping = {"keys": keys, "keep": keep} if "dropout" in options else {}
            compare(split, reference, mesh.tp, documents=texts, steps=1 if texts is None else 2, **dropping)
            assert_replicas_equal(split, mesh.cp)


@pytest.mark.ranks(2)
def test_context_is_refused_with_a_reason() -> None:
    mesh = Mesh(cp=2)
    with pytest.raises(ValueError, match=r"the 3 heads that are here, which do not divide; .* or the ring"):
        ParallelAttention(12, 3, Axis.single(), context=mesh.cp, context_form="all-to-all")
    with pytest.raises(ValueError, match="context_form 'rings': choose 'ring' or 'all-to-all'"):
        ParallelAttention(12, 3, Axis.single(), context_form="rings")  # type: ignore[arg-type]
    split = ParallelAttention(12, 3, Axis.single(), context=mesh.cp, rotary=Rotary(4))
    with pytest.raises(ValueError, match="sequence of 6 tokens does not divide over context axis 'cp'"):
        split(torch.zeros(3, 1, 12))
    with pytest.raises(ValueError, match=r"positions of shape \(4,\) for a sequence of 8 tokens in 1 rows"):
        split(torch.zeros(4, 1, 12), positions=torch.arange(4))
    assert mesh.ledger.total().calls == 0
