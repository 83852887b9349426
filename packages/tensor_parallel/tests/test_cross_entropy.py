"""Cross entropy over a split vocabulary against ``F.cross_entropy``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import F64, assert_near, on_ranks, part, values
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, full_index
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    column_linear,
    cross_entropy,
    split_features,
    vocab_parallel_cross_entropy,
)


def expected_loss(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    flat = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return flat.view(targets.shape)


@on_ranks
@pytest.mark.parametrize("vocab", [12, 11, 3])
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(ranks: int, vocab: int) -> None:
    axis = Mesh(tp=ranks).tp
    full = values(5, 4, vocab).mul(30).requires_grad_()
    targets = torch.arange(20).view(5, 4) % vocab
    targets[2, 1] = targets[4, 3] = -100
    weights = values(5, 4, seed=2)
    right = expected_loss(full, targets)
    (right * weights).sum().backward()
    assert full.grad is not None
    own = part(full.detach(), axis, 2).clone().requires_grad_()
    before = own.detach().clone()
    loss = vocab_parallel_cross_entropy(own, targets, axis, vocab_size=vocab)
    assert_near(loss, right)
    assert loss[2, 1] == loss[4, 3] == 0
    (loss * weights).sum().backward()
    assert_near(own.grad, part(full.grad, axis, 2))
    assert torch.equal(own.detach(), before)


@on_ranks
def test_the_z_loss_is_that_of_the_whole_vocabulary(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    full = values(6, 11).requires_grad_()
    targets = torch.arange(6)
    targets[3] = -1
    extra = 0.1 * full.logsumexp(-1).square() * (targets != -1)
    right = expected_loss(full, targets, -1) + extra
    right.sum().backward()
    assert full.grad is not None
    own = part(full.detach(), axis, 1).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, axis, vocab_size=11, ignore_index=-1, z_loss=0.1)
    assert_near(loss, right)
    loss.sum().backward()
    assert_near(own.grad, part(full.grad, axis, 1))


@on_ranks
def test_the_z_loss_apart_has_a_gradient_of_its_own(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    targets = torch.arange(6)
    targets[3] = -100
    weights, z_weights = values(6, seed=2), values(6, seed=3)
    for factor in (0.1, 0.0):
        full = values(6, 11).requires_grad_()
        right, extra = expected_loss(full, targets), factor * full.logsumexp(-1).square() * (targets != -100)
        (right * weights + extra * z_weights).sum().backward()
        assert full.grad is not None
        own = part(full.detach(), axis, 1).clone().requires_grad_()
        found = vocab_parallel_cross_entropy(own, targets, axis, vocab_size=11, z_loss=factor, parts=True)
        assert_near(found.loss, right)
        assert_near(found.z_loss, extra)
        (found.loss * weights + found.z_loss * z_weights).sum().backward()
        assert_near(own.grad, part(full.grad, axis, 1))


@on_ranks
def test_label_smoothing_is_over_the_whole_vocabulary(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for vocab in (12, 11, 5, 3, 2):  # on 3 and 4 ranks: uneven parts, and ranks without columns
        for smoothing, z_loss, ignored in ((0.1, 0.0, -100), (0.3, 0.01, -1), (1.0, 0.0, 0)):
            full = values(5, 4, vocab, seed=vocab).mul(20).requires_grad_()
            targets = torch.arange(20).view(5, 4) % vocab
            targets[2, 1] = targets[4, 3] = ignored
            weights = values(5, 4, seed=2)
            right = F.cross_entropy(
                full.flatten(0, 1),
                targets.flatten(),
                ignore_index=ignored,
                reduction="none",
                label_smoothing=smoothing,
            ).view(5, 4)
            right = right + z_loss * full.logsumexp(-1).square() * (targets != ignored)
            (expected,) = torch.autograd.grad((right * weights).sum(), full)
            own = part(full.detach(), axis, 2).clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(
                own,
                targets,
                axis,
                vocab_size=vocab,
                ignore_index=ignored,
                z_loss=z_loss,
                label_smoothing=smoothing,
            )
            assert_near(loss, right)
            (found,) = torch.autograd.grad((loss * weights).sum(), own)
            assert_near(found, part(expected, axis, 2))


@pytest.mark.ranks(2)
def test_the_logits_of_the_caller_are_never_written() -> None:
    axis = Mesh(tp=2).tp
    for smoothing in (0.0, 0.1):
        own = part(values(5, 4, 11).mul(3).float(), axis, 2).clone().requires_grad_()
        before = own.detach().clone()
        loss = vocab_parallel_cross_entropy(
            own, torch.arange(20).view(5, 4) % 11, axis, vocab_size=11, z_loss=0.1, label_smoothing=smoothing
        )
        assert torch.equal(own.detach(), before)
        loss.sum().backward()
        assert torch.equal(own.detach(), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numbers", [2, 3])
def test_two_small_collectives_and_none_backward(numbers: int) -> None:
    mesh = Mesh(tp=2)
    logits = values(5, 6).requires_grad_()
    smoothing = 0.0 if numbers == 2 else 0.1
    vocab_parallel_cross_entropy(
        logits, torch.arange(5), mesh.tp, vocab_size=12, label_smoothing=smoothing
    ).sum().backward()
    total = mesh.ledger.total()
    assert (total.calls, total.elements) == (2, 5 + numbers * 5)


def test_one_rank_communicates_nothing() -> None:
    axis = Axis.single()
    vocab_parallel_cross_entropy(values(5, 6), torch.arange(5), axis, vocab_size=6)
    assert axis.ledger.total().calls == 0


@pytest.mark.ranks(2)
def test_chunks_change_nothing() -> None:
    axis = Mesh(tp=2).tp
    own, targets = values(50, 6), torch.arange(50) % 12
    results = []
    for elements in (1 << 20, 6 * 7, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy, "_CHUNK_ON_CPU", elements)
            logits = own.clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(logits, targets, axis, vocab_size=12)
            loss.sum().backward()
            results.append((loss.detach(), logits.grad))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert grad is not None
        assert results[0][1] is not None
        assert torch.equal(grad, results[0][1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_are_float32_or_wider(dtype: torch.dtype) -> None:
    axis = Mesh(tp=2).tp
    full = values(8, 10).mul(5).to(dtype)
    targets = torch.arange(8)
    own = part(full, axis, 1).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, axis, vocab_size=10)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss(full.float(), targets), rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    assert own.grad is not None
    assert own.grad.dtype == dtype


@pytest.mark.ranks(2)
def test_large_logits_and_values_that_are_not_finite() -> None:
    axis = Mesh(tp=2).tp
    full = torch.zeros(4, 6, dtype=F64)
    full[0, 1], full[0, 4] = 5000.0, -5000.0
    full[1] = math.nan  # ignored: takes part in nothing
    full[2, 0] = -math.inf  # a logit that is masked out
    full[3, 3:] = -math.inf  # all logits of a rank
    targets = torch.tensor([4, -100, 3, 1])
    own = part(full, axis, 1).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, axis, vocab_size=6)
    torch.testing.assert_close(loss, torch.tensor([10000.0, 0.0, math.log(5), math.log(3)], dtype=F64))
    loss.sum().backward()
    assert own.grad is not None
    assert torch.isfinite(own.grad).all()
    assert not own.grad[1].any()


@pytest.mark.ranks(2)
def test_b026_only_the_real_vocabulary_takes_part() -> None:
    axis = Mesh(tp=2).tp
    table = VocabParallelEmbedding(11, 4, axis, dtype=F64)
    assert comm.split_sizes(11, 2)[axis.rank] == table.weight.shape[0]  # 6 and 5 rows, none of padding
    with torch.no_grad():
        table.weight.zero_()
    hidden, targets = torch.ones(3, 4, dtype=F64), torch.tensor([0, 5, 10])
    logits = column_linear(hidden, [table.weight], [None], axis)
    loss = vocab_parallel_cross_entropy(logits, targets, axis, vocab_size=11)
    torch.testing.assert_close(loss, torch.full((3,), math.log(11), dtype=F64))
    with torch.no_grad():
        table.weight.fill_(-0.25)  # every real logit is -1
    logits = column_linear(hidden, [table.weight], [None], axis)
    everywhere = comm.all_gather(logits.detach(), axis, 1, sizes=comm.split_sizes(11, 2))
    assert everywhere.shape == (3, 11)
    assert everywhere.argmax(-1).max() < 11
    loss = vocab_parallel_cross_entropy(logits, targets, axis, vocab_size=11)
    torch.testing.assert_close(loss, torch.full((3,), math.log(11), dtype=F64))
    loss.sum().backward()
    # what is exported has 11 rows, and loads into one process
    export = comm.all_gather(table.weight.detach(), axis, sizes=comm.split_sizes(11, 2))
    alone = VocabParallelEmbedding(11, 4, Axis.single(), dtype=F64)
    alone.load_state_dict({"weight": export})
    assert torch.equal(alone.weight[full_index(table.weight)], table.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["cp", "dp"])
def test_b017_ranks_with_few_valid_tokens_are_not_over_weighted(name: str) -> None:
    mesh = Mesh(cp=2) if name == "cp" else Mesh(dp=2)
    head = nn.Linear(4, 6, dtype=F64)
    with torch.no_grad():
        head.weight.copy_(values(6, 4))
        head.bias.copy_(values(6, seed=2))
    hidden, targets = values(16, 4, seed=3), torch.arange(16) % 6
    valid = torch.zeros(16, dtype=torch.bool)
    valid[:7] = valid[11] = True  # 7 of the first 8 tokens, 1 of the others
    targets = targets.masked_fill(~valid, -100)
    whole = F.cross_entropy(head(hidden), targets, reduction="sum") / 8
    expected = torch.autograd.grad(whole, list(head.parameters()))
    own_hidden, own_targets = part(hidden, mesh.data, 0), part(targets, mesh.data, 0)
    count = comm.all_reduce((own_targets != -100).sum(), mesh.data)
    assert count == 8
    single = Axis.single()
    loss = vocab_parallel_cross_entropy(head(own_hidden), own_targets, single, vocab_size=6).sum() / count
    found = torch.autograd.grad(loss, list(head.parameters()))
    assert_near(comm.all_reduce(loss.detach().clone(), mesh.data), whole.detach())
    for grad, right in zip(found, expected, strict=True):
        assert_near(comm.all_reduce(grad.clone(), mesh.data), right)


@pytest.mark.ranks(4)
def test_a_head_and_its_loss_over_two_axes_give_the_gradient_of_one_process() -> None:
    mesh = Mesh(dp=2, tp=2)
    torch.manual_seed(3)
    reference = nn.Linear(4, 11, dtype=F64)
    torch.manual_seed(3)
    head = ColumnParallelLinear(4, 11, mesh.tp, dtype=F64)
    hidden, targets = values(6, 4), torch.arange(6)
    F.cross_entropy(reference(hidden), targets).backward()
    logits = head(part(hidden, mesh.dp, 0))
    loss = vocab_parallel_cross_entropy(logits, part(targets, mesh.dp, 0), mesh.tp, vocab_size=11).sum() / 6
    loss.backward()
    assert head.weight.grad is not None
    assert reference.weight.grad is not None
    found = comm.all_reduce(head.weight.grad, mesh.dp)
    assert_near(found, reference.weight.grad[full_index(head.weight)])


def test_mistakes_are_named() -> None:
    axis, targets = Axis.single(), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"12 columns, but rank 0 of 1 holds 11 of a vocabulary of 11.*without padding"
    ):
        vocab_parallel_cross_entropy(torch.zeros(3, 12), targets, axis, vocab_size=11)
    with pytest.raises(ValueError, match=r"targets of shape \(3,\) for logits of shape \(2, 11\)"):
        vocab_parallel_cross_entropy(torch.zeros(2, 11), targets, axis, vocab_size=11)
    with pytest.raises(ValueError, match=r"label_smoothing 1\.5 is not in \[0, 1\]"):
        vocab_parallel_cross_entropy(torch.zeros(3, 11), targets, axis, vocab_size=11, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"z_loss -1\.0 is not a factor of 0 or more"):
        vocab_parallel_cross_entropy(torch.zeros(3, 11), targets, axis, vocab_size=11, z_loss=-1.0)
    with pytest.raises(ValueError, match="target 11 is outside the vocabulary of 11"):
        vocab_parallel_cross_entropy(torch.zeros(3, 11), targets + 11, axis, vocab_size=11)
    assert split_features(11, axis).length == 11
    assert vocab_parallel_cross_entropy(torch.zeros(0, 11), targets[:0], axis, vocab_size=11).shape == (0,)
