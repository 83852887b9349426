"""A layer moves exactly the bytes that theory asks for: the ledger, in numbers.

Per transformer layer and step, with a hidden state of ``A = s b h`` elements and ``n`` tensor ranks::

                            forward                           backward
    no sequence parallelism 2 all-reduces of A                2 all-reduces of A
    sequence parallelism    2 all-gathers, 2 reduce-scatters  2 reduce-scatters, 2 + 2 all-gathers, of A each

(two of the backward's all-gathers fetch the saved shards again; with ``keep_inputs`` there is nothing to fetch).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import part, values
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, WeightGradients, gradient_work
from shardweave.tensor_parallel import ColumnParallelLinear, ParallelAttention, RowParallelLinear

SEQUENCE, BATCH, HIDDEN = 12, 2, 12
ACTIVATION = SEQUENCE * BATCH * HIDDEN


class Layer(nn.Module):
    """Attention and MLP, without what lies between them."""

    def __init__(
        self, axis: Axis, sequence_dim: int | None, dtype: torch.dtype, keep_inputs: bool = False
    ) -> None:
        super().__init__()
        self.attention = ParallelAttention(
            HIDDEN, 12, axis, sequence_dim=sequence_dim, keep_inputs=keep_inputs, dtype=dtype
        )
        self.up = ColumnParallelLinear(
            HIDDEN, 48, axis, sequence_dim=sequence_dim, keep_inputs=keep_inputs, dtype=dtype
        )
        self.down = RowParallelLinear(48, HIDDEN, axis, sequence_dim=sequence_dim, dtype=dtype)

    def mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


def counts(mesh: Mesh) -> dict[str, tuple[int, int]]:
    kinds = {key.kind for key, _ in mesh.ledger}
    totals = {kind: mesh.ledger.total("tp", kind) for kind in sorted(kinds)}
    mesh.ledger.reset()
    return {kind: (total.calls, total.bytes) for kind, total in totals.items() if total.calls}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_sequence_parallelism(ranks: int, dtype: torch.dtype) -> None:
    mesh = Mesh(tp=ranks)
    layer = Layer(mesh.tp, None, dtype)
    x = values(SEQUENCE, BATCH, HIDDEN).to(dtype).requires_grad_()
    message = ACTIVATION * dtype.itemsize
    y = layer.mlp(x)
    assert counts(mesh) == {"all_reduce": (1, message)}
    y.sum().backward()
    assert counts(mesh) == {"all_reduce": (1, message)}
    y = layer(x)
    assert counts(mesh) == {"all_reduce": (2, 2 * message)}
    y.sum().backward()
    assert counts(mesh) == {"all_reduce": (2, 2 * message)}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_sequence_parallelism(ranks: int, dtype: torch.dtype) -> None:
    mesh = Mesh(tp=ranks)
    layer = Layer(mesh.tp, 0, dtype)
    x = part(values(SEQUENCE, BATCH, HIDDEN).to(dtype), mesh.tp, 0).requires_grad_()
    message = ACTIVATION * dtype.itemsize
    # The first call also tells how long each rank's part is: a number from each, for each of the two gathers.
    layer(x)
    assert counts(mesh) == {
        "all_gather": (4, 2 * message + 2 * ranks * 8),
        "reduce_scatter": (2, 2 * message),
    }
    y = layer.mlp(x)
    assert counts(mesh) == {"all_gather": (1, message), "reduce_scatter": (1, message)}
    y.sum().backward()
    assert counts(mesh) == {"all_gather": (2, 2 * message), "reduce_scatter": (1, message)}
    y = layer(x)
    assert counts(mesh) == {"all_gather": (2, 2 * message), "reduce_scatter": (2, 2 * message)}
    y.sum().backward()
    # a ring all-reduce is a reduce-scatter and an all-gather: only fetching the shards again is extra
    assert counts(mesh) == {"all_gather": (4, 4 * message), "reduce_scatter": (2, 2 * message)}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3, 4)])
def test_a_kept_input_is_not_gathered_again(ranks: int) -> None:
    mesh = Mesh(tp=ranks)
    torch.manual_seed(1)
    layer = Layer(mesh.tp, 0, torch.float64)
    torch.manual_seed(1)
    keeping = Layer(mesh.tp, 0, torch.float64, keep_inputs=True)
    x = part(values(SEQUENCE, BATCH, HIDDEN), mesh.tp, 0)
    upstream = part(values(SEQUENCE, BATCH, HIDDEN, seed=2), mesh.tp, 0)
    message = ACTIVATION * x.dtype.itemsize

    def trained(module: Layer) -> list[Tensor]:
        own = x.clone().requires_grad_()
        y = module(own)
        (y * upstream).sum().backward()
        gradients = [own.grad, *(parameter.grad for parameter in module.parameters())]
        return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]

    for module in (layer, keeping):
        module(x)  # the first call tells more, see above
    counts(mesh)
    expected = trained(layer)
    assert counts(mesh) == {"all_gather": (6, 6 * message), "reduce_scatter": (4, 4 * message)}
    found = trained(keeping)
    # what an all-reduce in their places would move: 8 (n - 1) / n of an activation, and not 10
    assert counts(mesh) == {"all_gather": (4, 4 * message), "reduce_scatter": (4, 4 * message)}
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    # deferred, the weight's gradient uses what was kept
    keeping.zero_grad()
    queue = WeightGradients()
    for parameter in keeping.parameters():
        gradient_work(parameter).queue = queue
    y = keeping(x.clone().requires_grad_())
    (y * upstream).sum().backward()
    queue.run()
    assert counts(mesh) == {"all_gather": (4, 4 * message), "reduce_scatter": (4, 4 * message)}
    for parameter, other in zip(keeping.parameters(), expected[2:], strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, other)


def test_one_rank_moves_nothing() -> None:
    mesh = Mesh()
    for sequence_dim, keep_inputs in ((None, False), (0, False), (0, True)):
        Layer(mesh.tp, sequence_dim, torch.float32, keep_inputs)(torch.ones(4, 2, HIDDEN)).sum().backward()
        assert counts(mesh) == {}
