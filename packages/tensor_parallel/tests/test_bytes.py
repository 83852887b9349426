"""A layer moves exactly the bytes that theory asks for: the ledger, in numbers.

Per transformer layer and step, with a hidden state of ``A = s b h`` elements and ``n`` tensor ranks::

                            forward                           backward
    no sequence parallelism 2 all-reduces of A                2 all-reduces of A
    sequence parallelism    2 all-gathers, 2 reduce-scatters  2 reduce-scatters, 2 + 2 all-gathers, of A each

(two of the backward's all-gathers fetch the saved shards again).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import part, values
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh
from shardweave.tensor_parallel import ColumnParallelLinear, ParallelAttention, RowParallelLinear

SEQUENCE, BATCH, HIDDEN = 12, 2, 12
ACTIVATION = SEQUENCE * BATCH * HIDDEN


class Layer(nn.Module):
    """Attention and MLP, without what lies between them."""

    def __init__(self, axis: Axis, sequence_dim: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = ParallelAttention(HIDDEN, 12, axis, sequence_dim=sequence_dim, dtype=dtype)
        self.up = ColumnParallelLinear(HIDDEN, 48, axis, sequence_dim=sequence_dim, dtype=dtype)
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
    y = layer.mlp(x)
    assert counts(mesh) == {"all_gather": (1, message), "reduce_scatter": (1, message)}
    y.sum().backward()
    assert counts(mesh) == {"all_gather": (2, 2 * message), "reduce_scatter": (1, message)}
    y = layer(x)
    assert counts(mesh) == {"all_gather": (2, 2 * message), "reduce_scatter": (2, 2 * message)}
    y.sum().backward()
    # a ring all-reduce is a reduce-scatter and an all-gather: only fetching the shards again is extra
    assert counts(mesh) == {"all_gather": (4, 4 * message), "reduce_scatter": (2, 2 * message)}


def test_one_rank_moves_nothing() -> None:
    mesh = Mesh()
    for sequence_dim in (None, 0):
        Layer(mesh.tp, sequence_dim, torch.float32)(torch.ones(4, 2, HIDDEN)).sum().backward()
        assert counts(mesh) == {}
