"""Results that a region under torch's checkpoint keeps: which, what of them is computed again, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, Mesh
from shardweave.tensor_parallel import (
    ATTENTION,
    LINEAR,
    ColumnParallelLinear,
    Kept,
    ParallelAttention,
    RowParallelLinear,
    products,
    softmax_lse,
)


class Net(nn.Module):
    """Attention, and two layers with an activation between."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.attention = ParallelAttention(8, 2, axis, dtype=torch.float64)
        self.up = ColumnParallelLinear(8, 12, axis, dtype=torch.float64)
        self.down = RowParallelLinear(12, 8, axis, dtype=torch.float64)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = torch.tanh(x + self.attention(x, documents=documents))
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return x + y


def run(net: Net, kinds: set[str] | None, documents: Tensor | None = None) -> list[Tensor]:
    """Output and gradients; None: nothing is computed again."""
    x = torch.linspace(-1, 1, 5 * 2 * 8, dtype=torch.float64).view(5, 2, 8).requires_grad_()
    options: dict[str, Any] = {"context_fn": Kept(kinds).contexts} if kinds else {}
    if kinds is None:
        y = net(x, documents)
    else:
        y = checkpoint(net, x, documents, use_reentrant=False, preserve_rng_state=False, **options)
    gradients = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
    return [y.detach(), *gradients]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_what_is_kept_is_computed_and_sent_once(ranks: int) -> None:
    mesh = Mesh(tp=ranks)
    net = Net(mesh.tp)
    right = run(net, None)
    sent = []
    for kinds, times in ((set(), 4), ({ATTENTION}, 4), ({LINEAR}, 2), ({LINEAR, ATTENTION}, 2)):
        before = mesh.ledger.total().sent
        with (
            patch.object(products, "_outputs", side_effect=products._outputs) as columns,
            patch.object(products, "_multiplied", side_effect=products._multiplied) as rows,
        ):
            found = run(net, kinds)
        # Two of each, twice or once; on one rank torch's own products, but for the fused one, where nobody asks for
        # kept results.
        wanted = (2, 0) if ranks == 1 and not kinds else (times, times)
        assert (columns.call_count, rows.call_count) == wanted
        sent.append(mesh.ledger.total().sent - before)
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True)), kinds
    if ranks > 1:
        # An all-reduce of the two rows' outputs in forward; that of the columns' inputs in backward.
        assert sent[0] == sent[1] == sent[2] * 3 // 2 == sent[3] * 3 // 2


def test_a_core_that_is_one_function_is_kept_as_a_whole() -> None:
    net, documents = Net(Axis.single()), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    right = run(net, None, documents)
    for kinds, times in (({LINEAR}, 2), ({ATTENTION}, 1)):
        with (
            patch.object(softmax_lse, "attend", side_effect=softmax_lse.attend),
            patch("shardweave.tensor_parallel.ring.attend", side_effect=softmax_lse.attend) as attend,
        ):
            found = run(net, kinds, documents)
        assert attend.call_count == times
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_a_result_that_was_changed_in_place_is_refused() -> None:
    layer = ColumnParallelLinear(8, 12, Axis.single())

    def forward(x: Tensor) -> Tensor:
        return torch.tanh(layer(torch.tanh(x)).mul_(2))

    x = torch.ones(3, 8, requires_grad=True)
    y = checkpoint(forward, x, use_reentrant=False, context_fn=Kept({LINEAR}).contexts)
    with pytest.raises(RuntimeError, match="kept for the backward pass and has been written to since"):
        y.sum().backward()


def test_the_core_alone() -> None:
    """``ParallelAttention(recompute=True)``, in training with gradients only."""
    plain, again = (
        ParallelAttention(8, 2, Axis.single(), recompute=recompute, dtype=torch.float64)
        for recompute in (False, True)
    )
    again.load_state_dict(plain.state_dict())
    x = torch.linspace(-1, 1, 5 * 2 * 8, dtype=torch.float64).view(5, 2, 8)
    found = [
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())) for layer in (plain, again)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with patch("shardweave.tensor_parallel.attention.checkpoint") as never, torch.no_grad():
        assert torch.equal(again(x), plain(x))
    never.assert_not_called()
