"""The zig-zag cut of a sequence over the context axis."""

from __future__ import annotations

import pytest
import torch
from packages.tensor_parallel.tests.reference import values

from shardweave.comm import Axis, Mesh
from shardweave.tensor_parallel import (
    check_context,
    context_positions,
    cut_context,
    document_positions,
    document_targets,
    gather_context,
)
from shardweave.tensor_parallel.context import context_ranges


def test_who_holds_what() -> None:
    holders = [-1] * 16
    for rank in range(4):
        for part in context_ranges(16, 4, rank):
            for position in part:
                holders[position] = rank
    assert holders == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]


def test_a_causal_mask_is_the_same_work_on_every_rank() -> None:
    for length, ranks in ((8, 2), (24, 4), (48, 3)):
        work = {
            sum(1 + position for part in context_ranges(length, ranks, rank) for position in part)
            for rank in range(ranks)
        }
        assert len(work) == 1


@pytest.mark.ranks(4)
def test_cut_and_gather_are_inverse_and_so_are_their_gradients() -> None:
    for axis in (Mesh(cp=4).cp, Mesh(cp=2, dp=2).cp, Axis.single("cp")):
        x = values(3, 16, 2)
        mine = cut_context(x, axis, 1)
        assert torch.equal(mine, x[:, context_positions(16, axis)])
        assert torch.equal(gather_context(mine, axis, 1), x)
        own = mine.clone().requires_grad_()
        weights = values(3, 16, 2, seed=2)
        (gather_context(own, axis, 1) * weights).sum().backward()
        assert own.grad is not None
        assert torch.equal(own.grad, cut_context(weights, axis, 1))
        whole = x.clone().requires_grad_()
        cut_context(whole, axis, 1).sum().backward()
        assert whole.grad is not None
        assert torch.equal(cut_context(whole.grad, axis, 1), torch.ones_like(mine))
        assert whole.grad.sum() == mine.numel()


@pytest.mark.ranks(2)
def test_b033_a_sequence_that_the_zig_zag_does_not_divide_is_refused_before_any_message() -> None:
    mesh = Mesh(cp=2)
    with pytest.raises(
        ValueError, match=r"sequence of 6 tokens .* 'cp' of 2 ranks.* multiple of 4; use 4 or 8"
    ):
        cut_context(torch.zeros(1, 6), mesh.cp, 1)
    with pytest.raises(ValueError, match="multiple of 4; use 4 tokens"):
        context_positions(2, mesh.cp)
    check_context(12, mesh.cp, tensor=3)
    with pytest.raises(
        ValueError, match=r"leaves 6 to each, which do not divide over 4 tensor ranks.* multiple of 8"
    ):
        check_context(12, mesh.cp, tensor=4)
    check_context(7, Axis.single())
    with pytest.raises(ValueError, match=r"do not divide over 2 tensor ranks.* multiple of 2 tokens"):
        check_context(7, Axis.single(), tensor=2)
    assert mesh.ledger.total().calls == 0


def test_documents_say_positions_and_labels() -> None:
    documents = torch.tensor([[4, 4, 4, 4, 7, 7, 7], [0, 1, 1, 2, 2, 2, 3]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 0, 1, 0, 1, 2, 0]]
    targets = torch.arange(14).view(2, 7)
    expected = [[0, 1, 2, -100, 4, 5, 6], [-100, 8, -100, 10, 11, -100, 13]]
    assert document_targets(targets, documents).tolist() == expected
    behind = torch.cat([documents, torch.tensor([[7], [4]])], 1)
    expected[1][-1] = -100
    assert document_targets(targets, behind).tolist() == expected
    assert document_targets(targets, behind, -1)[1].tolist() == [-1, 8, -1, 10, 11, -1, -1]
    with pytest.raises(ValueError, match="one for each token, not"):
        document_positions(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"documents of shape \(2, 7\) for targets of shape \(2, 3\)"):
        document_targets(targets[:, :3], documents)
