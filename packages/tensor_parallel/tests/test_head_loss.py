"""Head and loss in chunks against torch's own product and ``F.cross_entropy``, on whole tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packages.comm.tests.live import LiveBytes
from packages.tensor_parallel.tests.reference import assert_near, on_ranks, part, values
from torch import Tensor

from shardweave.comm import Axis, Mesh, WeightGradients, gradient_work
from shardweave.tensor_parallel import (
    head_loss,
    vocab_parallel_head_loss,
)

HIDDEN = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A head, and how its loss is taken."""

    vocab: int = 13
    bias: bool = False
    sequence_dim: int | None = None
    ignored: int = -100
    z_loss: float = 0.0
    smoothing: float = 0.0
    chunk: int | None = None

    def x(self) -> Tensor:
        return values(12, 12, HIDDEN, seed=self.vocab)

    def weight(self) -> Tensor:
        return values(self.vocab, HIDDEN, seed=2).mul(3)

    def of_bias(self) -> Tensor | None:
        return values(self.vocab, seed=3) if self.bias else None

    def targets(self) -> Tensor:
        targets = torch.arange(144).view(12, 12) % self.vocab
        targets[2, 1] = targets[4, 3] = targets[11, 11] = self.ignored
        return targets

    def weights(self) -> Tensor:
        """What each token's loss is multiplied by: an upstream gradient that differs everywhere."""
        return values(12, 12, seed=4)

    def expected(self) -> list[Tensor]:
        """Loss and gradients of one process."""
        given = [self.x(), self.weight(), *([values(self.vocab, seed=3)] if self.bias else [])]
        x, weight, *bias = leaves = [tensor.requires_grad_() for tensor in given]
        logits = F.linear(x, weight, bias[0] if bias else None)
        targets = self.targets()
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            ignore_index=self.ignored,
            reduction="none",
            label_smoothing=self.smoothing,
        ).view(12, 12)
        loss = loss + self.z_loss * logits.logsumexp(-1).square() * (targets != self.ignored)
        return [loss.detach(), *torch.autograd.grad((loss * self.weights()).sum(), leaves)]

    def leaves(self, axis: Axis) -> list[Tensor]:
        """This rank's input, weight and bias."""
        bias = self.of_bias()
        given = [part(self.x(), axis, self.sequence_dim), part(self.weight(), axis, 0)]
        given += [] if bias is None else [part(bias, axis, 0)]
        return [tensor.clone().requires_grad_() for tensor in given]

    def loss(self, leaves: list[Tensor], axis: Axis) -> Tensor:
        return vocab_parallel_head_loss(
            leaves[0],
            leaves[1],
            self.targets(),
            axis,
            vocab_size=self.vocab,
            bias=leaves[2] if self.bias else None,
            sequence_dim=self.sequence_dim,
            ignore_index=self.ignored,
            z_loss=self.z_loss,
            label_smoothing=self.smoothing,
            chunk=self.chunk,
        )

    def mine(self, expected: list[Tensor], axis: Axis) -> list[Tensor]:
        """This rank's part of what :meth:`expected` gave."""
        loss, x, *parameters = expected
        return [loss, part(x, axis, self.sequence_dim), *(part(tensor, axis, 0) for tensor in parameters)]


CASES = [
    Case(),
    Case(chunk=1, bias=True),
    Case(chunk=7, bias=True, sequence_dim=0),
    Case(chunk=143, sequence_dim=1, smoothing=0.1),
    Case(chunk=5, bias=True, smoothing=0.2, z_loss=0.01, ignored=-1, sequence_dim=0),
    Case(
        vocab=2, bias=True, chunk=50, smoothing=0.1, sequence_dim=1
    ),  # on 3 and 4 ranks: ranks without columns
    Case(vocab=3, z_loss=0.1, ignored=0),
]


@on_ranks
def test_loss_and_gradients_are_those_of_the_whole(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for case in CASES:
        expected = case.mine(case.expected(), axis)
        leaves = case.leaves(axis)
        before = [leaf.detach().clone() for leaf in leaves]
        loss = case.loss(leaves, axis)
        (loss * case.weights()).sum().backward()
        for found, right in zip([loss.detach(), *(leaf.grad for leaf in leaves)], expected, strict=True):
            assert_near(found, right, str(case))
        for leaf, value in zip(leaves, before, strict=True):
            assert torch.equal(leaf.detach(), value)


@on_ranks
def test_deferred_weight_gradients_are_the_same(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for case in CASES:
        _, d_x, d_weight, *d_bias = case.mine(case.expected(), axis)
        x, weight, *bias = leaves = case.leaves(axis)
        queue = WeightGradients()
        final: list[Tensor] = []
        gradient_work(weight).queue = queue
        gradient_work(weight).subscribe(weight, final.append)
        for _ in range(2):
            (case.loss(leaves, axis) * case.weights()).sum().backward()
        assert len(queue) == 2
        assert weight.grad is None
        assert final == []
        queue.run()
        assert final == [weight]
        for found, right in zip([x, weight, *bias], [d_x, d_weight, *d_bias], strict=True):
            assert found.grad is not None
            assert not found.grad.requires_grad
            assert_near(found.grad, 2 * right, str(case))


def queued(case: Case, axis: Axis) -> tuple[list[Tensor], WeightGradients]:
    leaves = case.leaves(axis)
    queue = WeightGradients()
    gradient_work(leaves[1]).queue = queue
    return leaves, queue


def test_a_weight_that_was_stepped_too_early_is_an_error() -> None:
    axis, case = Axis.single(), Case(bias=True)
    for which in (1, 2):
        leaves = case.leaves(axis)
        loss = case.loss(leaves, axis).sum()
        with torch.no_grad():
            leaves[which].add_(1.0)
        with pytest.raises(RuntimeError, match="modified between the forward and the backward"):
            loss.backward()
    leaves, queue = queued(case, axis)
    case.loss(leaves, axis).sum().backward()
    with torch.no_grad():
        leaves[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified between the forward and the backward"):
        queue.run()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("chunk", [1, 10, None])
def test_the_collectives_do_not_depend_on_the_number_of_chunks(chunk: int | None) -> None:
    mesh = Mesh(tp=2)
    tokens = 144

    def counted() -> dict[str, tuple[int, int]]:
        kinds = sorted({key.kind for key, _ in mesh.ledger})
        totals = {kind: mesh.ledger.total(kind=kind) for kind in kinds}
        mesh.ledger.reset()
        return {kind: (total.calls, total.elements) for kind, total in totals.items() if total.calls}

    for dim in (None, 0):
        case = Case(chunk=chunk, sequence_dim=dim, smoothing=0.1)
        gathered = {} if dim is None else {"all_gather": (1, tokens * HIDDEN)}
        leaves = case.leaves(mesh.tp)
        mesh.ledger.reset()
        loss = case.loss(leaves, mesh.tp).sum()
        assert counted() == {"all_reduce": (2, tokens + 3 * tokens), **gathered}
        loss.backward()
        reduced = "all_reduce" if dim is None else "reduce_scatter"
        assert counted() == {reduced: (1, tokens * HIDDEN), **gathered}
        loss = case.loss([leaves[0].detach(), leaves[1]], mesh.tp).sum()
        mesh.ledger.reset()
        loss.backward()
        assert counted() == gathered  # an input that wants no gradient is not reduced


def test_a_frozen_head_does_no_work_for_its_weight() -> None:
    axis, case = Axis.single(), Case()
    leaves, queue = queued(case, axis)
    leaves[1].requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss, "_add_product", None)
        (case.loss(leaves, axis) * case.weights()).sum().backward()
    assert len(queue) == 0
    assert_near(leaves[0].grad, case.expected()[1])
    with torch.no_grad():
        assert not case.loss(leaves, axis).requires_grad


@pytest.mark.ranks(2)
def test_low_precision_stays_near_and_sums_wide() -> None:
    axis = Mesh(tp=2).tp
    case = Case(chunk=10, bias=True, smoothing=0.1)
    expected = case.mine(case.expected(), axis)
    low = [leaf.detach().to(torch.bfloat16).requires_grad_() for leaf in case.leaves(axis)]
    under = [leaf.detach().float().requires_grad_() for leaf in case.leaves(axis)]
    for leaves, autocast in ((low, False), (under, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(leaves, axis)
        assert loss.dtype == torch.float32
        (loss * case.weights()).sum().backward()
        found_all = [loss.detach(), *(leaf.grad for leaf in leaves)]
        for found, dtype, right in zip(
            found_all, [torch.float32, *(leaf.dtype for leaf in leaves)], expected, strict=True
        ):
            assert found is not None
            assert found.dtype == dtype
            assert (found.double() - right).abs().max() < 0.03 * right.abs().max()


def test_ignored_tokens_may_have_logits_that_are_not_finite() -> None:
    axis, case = Axis.single(), Case(bias=True, chunk=20, smoothing=0.1, z_loss=0.1)
    x, weight, bias = case.leaves(axis)
    with torch.no_grad():
        bias[0] = float("inf")
    ignored = torch.full((12, 12), -100)
    loss = vocab_parallel_head_loss(x, weight, ignored, axis, vocab_size=13, bias=bias, z_loss=0.1)
    assert not loss.any()
    loss.sum().backward()
    for leaf in (x, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_no_tokens() -> None:
    axis = Axis.single()
    x, weight = torch.zeros(0, 3, HIDDEN, requires_grad=True), torch.ones(7, HIDDEN, requires_grad=True)
    loss = vocab_parallel_head_loss(x, weight, torch.zeros(0, 3, dtype=torch.int64), axis, vocab_size=7)
    assert loss.shape == (0, 3)
    loss.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert not weight.grad.any()


def test_mistakes_are_named() -> None:
    axis = Axis.single()
    x, weight, targets = torch.zeros(3, 4), torch.zeros(11, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"weight of shape \(12, 4\).*holds 11 rows of a vocabulary of 11"):
        vocab_parallel_head_loss(x, torch.zeros(12, 4), targets, axis, vocab_size=11)
    with pytest.raises(ValueError, match=r"weight of shape \(11, 4\).*of 5 features"):
        vocab_parallel_head_loss(torch.zeros(3, 5), weight, targets, axis, vocab_size=11)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\)"):
        vocab_parallel_head_loss(x, weight, targets, axis, vocab_size=11, bias=torch.zeros(4))
    with pytest.raises(ValueError, match=r"targets of shape \(2,\) for tokens of shape \(3,\)"):
        vocab_parallel_head_loss(x, weight, targets[:2], axis, vocab_size=11)
    with pytest.raises(ValueError, match="chunk 0: at least one token"):
        vocab_parallel_head_loss(x, weight, targets, axis, vocab_size=11, chunk=0)
    with pytest.raises(ValueError, match="sequence_dim 1 of an input of shape"):
        vocab_parallel_head_loss(x, weight, targets, axis, vocab_size=11, sequence_dim=1)
    with pytest.raises(ValueError, match="target 11 is outside the vocabulary of 11"):
        vocab_parallel_head_loss(x, weight, targets + 11, axis, vocab_size=11)


def peak_of(loss: Callable[[Tensor, Tensor, Tensor], Tensor], vocab: int, tokens: int) -> int:
    x, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    targets = torch.arange(tokens)
    live = LiveBytes(float("inf"))
    with live:
        loss(x, weight, targets).mean().backward()
    return live.peak


def test_peak_memory_is_a_quarter_of_the_plain_way_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and logits in the proportion of a real head, and small: half a gigabyte takes seconds to fill."""
    monkeypatch.setattr(head_loss, "_CHUNK_ON_CPU", head_loss._CHUNK_ON_CPU // 8)
    vocab, tokens, axis = 25_000, 512, Axis.single()

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets, reduction="none")

    def chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_head_loss(x, weight, targets, axis, vocab_size=vocab)

    ours, logits = peak_of(chunked, vocab, tokens), vocab * tokens * 4
    assert ours < logits / 4
    theirs = peak_of(plain, vocab, tokens)
    assert theirs >= 2 * logits  # it holds the logits and their gradient
    assert ours <= theirs / 4
