"""The vocabulary-parallel embedding against ``nn.Embedding``."""

from __future__ import annotations

import pytest
import torch
from packages.tensor_parallel.tests.reference import F64, assert_same_training, on_ranks, part, values, whole
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, WeightGradients, gradient_work
from shardweave.tensor_parallel import VocabParallelEmbedding


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("vocab", [12, 11, 3, 2])
def test_trains_like_the_whole_table(ranks: int, sequence_dim: int | None, vocab: int) -> None:
    axis = Mesh(tp=ranks).tp
    torch.manual_seed(3)
    reference = nn.Embedding(vocab, 5, dtype=F64)
    torch.manual_seed(3)
    split = VocabParallelEmbedding(vocab, 5, axis, sequence_dim=sequence_dim, dtype=F64)
    ids = torch.arange(24).view(12, 2).repeat(1, 6) % vocab
    weights = values(12, 12, 5)

    def step(module: nn.Module, dim: int | None) -> Tensor:
        y = module(ids)
        (y * part(weights, axis, dim)).sum().backward()
        return whole(y.detach(), axis, dim)

    assert_same_training(
        split, reference, axis, lambda: step(split, sequence_dim), lambda: step(reference, None)
    )


@on_ranks
def test_a_deferred_gradient_is_the_same(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for vocab, padding, dim in ((11, None, None), (11, 3, 0), (3, -1, 1), (2, None, 0)):
        torch.manual_seed(3)
        table = VocabParallelEmbedding(vocab, 5, axis, padding_idx=padding, sequence_dim=dim, dtype=F64)
        batches = [torch.arange(144).view(12, 12) % vocab, torch.zeros(12, 12, dtype=torch.int64)]
        upstream = part(values(12, 12, 5), axis, dim)
        for ids in batches:
            (table(ids) * upstream).sum().backward()
        assert table.weight.grad is not None
        expected, table.weight.grad = table.weight.grad, None
        queue = WeightGradients()
        final: list[Tensor] = []
        gradient_work(table.weight).queue = queue
        gradient_work(table.weight).subscribe(table.weight, final.append)
        for ids in batches:
            (table(ids) * upstream).sum().backward()
        assert len(queue) == 2
        assert table.weight.grad is None
        assert final == []
        queue.run()
        assert len(final) == 1
        assert table.weight.grad is not None
        assert not table.weight.grad.requires_grad
        assert torch.equal(table.weight.grad, expected)
        table.weight.requires_grad_(False)
        assert not table(batches[0]).requires_grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("padding", [1, -1])
def test_the_padding_row_starts_at_zero_and_stays(padding: int) -> None:
    axis = Mesh(tp=2).tp
    torch.manual_seed(3)
    reference = nn.Embedding(7, 4, padding_idx=padding, dtype=F64)
    torch.manual_seed(3)
    split = VocabParallelEmbedding(7, 4, axis, padding_idx=padding, dtype=F64)
    ids = torch.tensor([0, 1, 6, 3, 1])

    def step(module: nn.Module) -> Tensor:
        y: Tensor = module(ids)
        y.square().sum().backward()
        return y.detach()

    assert_same_training(split, reference, axis, lambda: step(split), lambda: step(reference))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_what_is_not_finite_in_one_row_is_in_no_other(dtype: torch.dtype) -> None:
    """Row 0 of a rank stands for the tokens of the other one until they are cleared."""
    axis = Mesh(tp=2).tp
    layer = VocabParallelEmbedding(6, 4, axis, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(4.0) - axis.rank)
        layer.weight[0] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    for ids in (torch.tensor([1, 2, 4, 5]), torch.tensor([[1, 2, 4, 5]] * 3, dtype=torch.int32)):
        right = torch.arange(4.0) - torch.tensor([[0.0], [0.0], [1.0], [1.0]])
        assert torch.equal(layer(ids), right.to(dtype).expand(*ids.shape, 4))
    assert not layer(torch.tensor([0, 3])).isfinite().any()
    layer(torch.tensor([1, 1, 4, 5])).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.sum(1).tolist() == ([0, 8, 0] if axis.is_first else [0, 4, 4])


@pytest.mark.ranks(2)
def test_with_sequence_parallelism_the_sum_is_a_reduce_scatter() -> None:
    mesh = Mesh(tp=2)
    layer = VocabParallelEmbedding(7, 4, mesh.tp, sequence_dim=0, dtype=F64)
    layer(torch.arange(6))
    compared = mesh.ledger.total("tp", "all_gather")
    assert (compared.calls, compared.bytes) == (
        1,
        2 * 3 * 8,
    )  # the first call compares three numbers of the ids
    mesh.ledger.reset()
    y = layer(torch.arange(6))
    assert y.shape == (3, 4)
    y.sum().backward()
    assert mesh.ledger.total("tp", "reduce_scatter").bytes == 6 * 4 * 8
    assert mesh.ledger.total("tp", "all_gather").bytes == 6 * 4 * 8
    assert mesh.ledger.total("tp").calls == 2


@pytest.mark.ranks(2)
def test_b033_a_sequence_that_does_not_divide_is_refused() -> None:
    mesh = Mesh(tp=2)
    layer = VocabParallelEmbedding(7, 4, mesh.tp, sequence_dim=1)
    with pytest.raises(ValueError, match=r"sequence length 5 does not divide over the 2 ranks"):
        layer(torch.zeros(2, 5, dtype=torch.int64))
    assert mesh.ledger.total().calls == 0


@pytest.mark.parametrize("bad", [7, -1, 1000])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    layer = VocabParallelEmbedding(7, 4, Axis.single())
    with pytest.raises(ValueError, match=rf"token id {bad} is outside the vocabulary of 7 \(0 to 6\)"):
        layer(torch.tensor([0, bad]))
    assert layer(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 4)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="padding_idx 7 is not one of the 7 rows"):
        VocabParallelEmbedding(7, 4, Axis.single(), padding_idx=7)
    with pytest.raises(ValueError, match="sequence_dim 2 is not a dimension"):
        VocabParallelEmbedding(7, 4, Axis.single(), sequence_dim=2)(torch.zeros(2, 2, dtype=torch.int64))
