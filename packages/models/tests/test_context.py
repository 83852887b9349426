"""Sequences cut over a context axis, and several documents in a row, against one process and against each alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build
from packages.models.tests.training import expect_equal_training, near
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardweave import comm
from shardweave.comm import Axis, DropoutStreams, Mesh
from shardweave.models import Transformer, TransformerConfig
from shardweave.tensor_parallel import context_positions, document_targets

FORMS: tuple[Literal["ring", "all-to-all"], ...] = ("ring", "all-to-all")
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4], [2, 3, 3, 3, 3, 3, 3, 0]])
STREAMS = DropoutStreams(3, 7, torch.tensor([4, 1, 9]))


def expect_equal_over(
    config: TransformerConfig,
    mesh: Mesh,
    targets: Tensor,
    *,
    form: Literal["ring", "all-to-all"],
    sequence_parallel: bool,
    documents: Tensor | None,
    streams: DropoutStreams | None,
) -> None:
    split = build(
        config, tensor=mesh.tp, sequence_parallel=sequence_parallel, context=mesh.cp, context_form=form
    )
    expect_equal_training(build(config), split, targets, streams=streams, documents=documents)


def layouts() -> Iterator[tuple[Mesh, bool]]:
    yield Mesh(cp=4), False
    yield Mesh(cp=2, dp=2), False
    yield Mesh(cp=2, tp=2), False
    yield Mesh(cp=2, tp=2), True


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", FORMS)
def test_training_equals_one_process(form: Literal["ring", "all-to-all"]) -> None:
    """Every family; dropout and documents take turns, so that each meets each."""
    turn = 0
    for number, (mesh, sequence_parallel) in enumerate(layouts()):
        for family, config in list(FAMILIES.items())[:: 1 if number % 3 == 0 else 2]:
            _, targets = batch_of(config)
            documents = DOCUMENTS if turn % 2 else None
            dropping = turn % 3 == 0
            turn += 1
            if dropping:
                config = replace(config, dropout=0.3, attention_dropout=0.2)
            expect_equal_over(
                config,
                mesh,
                targets if family != "gpt2" else document_targets(targets, DOCUMENTS),
                form=form,
                sequence_parallel=sequence_parallel,
                documents=documents,
                streams=STREAMS if dropping else None,
            )


@pytest.mark.ranks(2)
def test_b017_ranks_with_unequal_numbers_of_valid_tokens() -> None:
    """Sequence 8 over cp 2: seven valid tokens on one rank and one on the other, then all on one."""
    mesh = Mesh(cp=2)
    config = FAMILIES["llama"]
    _, targets = batch_of(config)
    positions = [
        comm.all_gather(context_positions(8, mesh.cp), mesh.cp, 0).view(2, 4)[rank] for rank in (0, 1)
    ]
    for numbers in ((7, 1), (0, 5)):
        uneven = torch.full_like(targets, -100)
        for rank, count in enumerate(numbers):
            for place in range(count):
                row, column = place % 3, positions[rank][place // 3]
                uneven[row, column] = (row + place) % config.vocab
        assert (uneven != -100).sum() == sum(numbers)
        for form in FORMS:
            expect_equal_over(
                config, mesh, uneven, form=form, sequence_parallel=False, documents=None, streams=None
            )


def alone(model: Transformer, tokens: Tensor) -> Tensor:
    return model.gather_logits(model(tokens))


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
def test_b106_packed_documents_are_as_if_alone(ranks: int) -> None:
    """Documents of 5 and 3 tokens in one row, in one process and over a context axis, also with recomputation."""
    axis = Mesh(cp=ranks).cp if ranks > 1 else Axis.single("cp")
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    for (family, config), form in product(FAMILIES.items(), FORMS[:ranks]):
        model, single = build(config, context=axis, context_form=form), build(config)
        tokens = batch_of(config)[0][:1]

        def packed(tokens: Tensor, model: Transformer = model) -> Tensor:
            return model.gather_logits(model(tokens, documents=documents))

        logits = packed(tokens)
        near(logits[:5], single(tokens[:, :5]), family)
        near(logits[5:], single(tokens[:, 5:]), family)
        changed = tokens.clone()
        changed[0, 1] = (changed[0, 1] + 1) % config.vocab
        near(packed(changed)[5:], logits[5:], family)
        assert (packed(changed)[:5] - logits[:5]).abs().max() > 1e-4
        assert (model.gather_logits(model(tokens))[5:] - logits[5:]).abs().max() > 1e-4
        again = checkpoint(model, tokens, documents=documents, use_reentrant=False)
        targets = document_targets(tokens.roll(-1, 1), torch.cat([documents, documents[:, :1]], 1))
        assert targets[0, 4] == targets[0, 7] == -100
        gradients = []
        for result in (model(tokens, documents=documents), again):
            model.zero_grad()
            model.loss(result, targets).backward()
            comm.sum_partial_gradients(model.parameters())
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        apart = single.loss(single(tokens[:, :5]), targets[:, :5]) + single.loss(
            single(tokens[:, 5:]), targets[:, 5:]
        )
        apart.backward()
        for first, second, own in zip(*gradients, single.parameters(), strict=True):
            assert torch.equal(first, second)
            near(first, own.grad, family)


@pytest.mark.ranks(2)
def test_b033_a_sequence_that_does_not_divide_is_refused_before_any_message() -> None:
    mesh = Mesh(cp=2)
    model = Transformer(FAMILIES["llama"], context=mesh.cp)
    with pytest.raises(ValueError, match=r"6 tokens does not divide over context axis 'cp' of 2 ranks"):
        model(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logits are \[s / 2, b, vocab\]"):
        model.loss(torch.zeros(4, 1, 11), torch.zeros(1, 4, dtype=torch.int64))
    assert mesh.ledger.total().calls == 0
    with pytest.raises(ValueError, match=r"documents of shape \(1, 4\) for rows of shape \(1, 8\)"):
        model(torch.zeros(1, 8, dtype=torch.int64), documents=torch.zeros(1, 4, dtype=torch.int64))
    assert mesh.ledger.total().calls == 0


@pytest.mark.ranks(2)
def test_without_streams_context_ranks_share_the_seed() -> None:
    """The rank's own seed would drop other channels of other ranks; with equal seeds it is one process's pass."""
    mesh = Mesh(cp=2)
    config = replace(FAMILIES["gpt2"], dropout=0.3, attention_dropout=0.2)
    tokens, _ = batch_of(config)
    split, whole = build(config, context=mesh.cp), build(config)
    torch.manual_seed(5)
    expected = whole(tokens)
    torch.manual_seed(5 + mesh.cp.rank)
    near(split.gather_logits(split(tokens)), expected)
