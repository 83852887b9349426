"""An embedding table whose rows are split over an axis.

The vocabulary is the largest matrix of many models. Each rank holds some rows, looks up the tokens that are
among them, leaves zeros for all others, and the sum over the ranks is the lookup in the whole table. No row
is padding: 11 tokens on two ranks are 6 and 5. The gradient of the table can be put off like that of a product, see
[Note: Deferred weight gradients] in ``weights.py``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardweave.comm import Axis, all_reduce_computed, reduce_scatter_to

from .alike import Alike
from .asking import check_sequence_dim
from .eager import eager
from .features import feature_split
from .layer import ParallelLayer
from .products import check_sequence
from .weights import now_or_later

__all__ = ["VocabParallelEmbedding", "check_ids"]


class VocabParallelEmbedding(ParallelLayer):
    """``nn.Embedding`` whose rows are split over an axis (Shoeybi et al., section 3, arXiv:1909.08053).

    This rank holds ``weight`` ``[vocab_r, h]``. Input: token ids of any shape, the same on every rank; output
    ``[*ids.shape, h]``, the same on every rank, or this rank's part along ``sequence_dim``.

    Args:
        num_embeddings: rows of the whole table, its real size; split in balanced parts.
        embedding_dim: length of a row.
        axis: the ranks that share the table.
        padding_idx: as in ``nn.Embedding``: a row that starts as zero and gets no gradient.
        sequence_dim: with sequence parallelism the output is this rank's part along this dimension (of the
            ids, which are still whole), by reduce-scatter; backward gathers.
        device: as in ``nn.Embedding``.
        dtype: as in ``nn.Embedding``.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Axis,
        *,
        padding_idx: int | None = None,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is not one of the {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.split = feature_split(num_embeddings, axis, "num_embeddings")
        check_sequence_dim(sequence_dim)
        self.axis, self.sequence_dim = axis, sequence_dim
        self.alike = Alike()
        record = self.split.sharding(axis, (num_embeddings, embedding_dim), 0)
        self._new_parameters(
            {"weight": record}, {"weight": (self.split.length, embedding_dim)}, device, dtype
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws what ``nn.Embedding`` would draw, whole, and keeps this rank's rows."""
        whole = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        self.weight.copy_(whole.weight[self.split.index])

    @eager
    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``[...]`` to rows ``[..., h]``. The first call compares the ids of all ranks.

        Raises:
            ValueError: for an id outside the vocabulary (looked for on the CPU only; on an accelerator
                looking would mean waiting for it), ids that are no integers, a sequence that does not divide over
                the axis, or ids that differ between its ranks.
        """
        check_ids(ids, self.num_embeddings, "token id")
        if self.sequence_dim is None:
            self.alike.check_tokens(ids, self.axis)
            return self._own_rows(ids, summed=True)
        if not 0 <= self.sequence_dim < ids.dim():
            raise ValueError(
                f"sequence_dim {self.sequence_dim} is not a dimension of ids of shape {tuple(ids.shape)}"
            )
        check_sequence(ids.shape[self.sequence_dim], self.axis)
        self.alike.check_tokens(ids, self.axis)
        return reduce_scatter_to(self._own_rows(ids, summed=False), self.axis, self.sequence_dim)

    def _own_rows(self, ids: Tensor, *, summed: bool) -> Tensor:
        """The rows that this rank holds, zeros for those of other ranks; ``summed``: over the axis, so all rows."""
        local = ids - self.split.start
        elsewhere = None
        if self.axis.size > 1:
            elsewhere = (local < 0) | (local >= self.split.length)
            local = local.masked_fill(elsewhere, 0)
        axis = self.axis if summed else None
        rows = _Lookup.apply(self.weight, local, elsewhere, self._own_padding(), axis)  # type: ignore[no-untyped-call]
        return cast(Tensor, rows)

    def _own_padding(self) -> int | None:
        if self.padding_idx is None:
            return None
        local = self.padding_idx - self.split.start
        return local if 0 <= local < self.split.length else None

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings} (here {self.split.length}), {self.embedding_dim}, "
            f"axis={self.axis.name}:{self.axis.size}"
        )


class _Lookup(torch.autograd.Function):
    """Rows ``local`` of a ``weight`` ``[vocab_r, h]``; zeros, and no gradient, where they are ``elsewhere``. Their sum
    over ``axis``, if there is one; the gradient of every rank's is that of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        local: Tensor,
        elsewhere: Tensor | None,
        padding: int | None,
        axis: Axis | None,
    ) -> Tensor:
        ctx.save_for_backward(local, elsewhere)
        # The number of rows is asked now: in backward the weight may be away, and is not needed.
        ctx.weight, ctx.num_rows, ctx.padding = weight, weight.shape[0], padding
        shape = torch.Size((*local.shape, weight.shape[1]))

        def rows(into: Tensor | None) -> Tensor:
            if not weight.shape[0]:  # more ranks than rows
                return weight.new_zeros(shape) if into is None else into.zero_()
            if into is None:
                found = F.embedding(local, weight)
            else:
                found = into
                torch.index_select(weight, 0, local.flatten(), out=into.view(-1, shape[-1]))
            return found if elsewhere is None else _cleared(found, elsewhere)

        if axis is None:
            return rows(None)
        return all_reduce_computed(rows, shape, axis, dtype=weight.dtype, device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        local, elsewhere = ctx.saved_tensors
        num_rows, padding = ctx.num_rows, ctx.padding

        def d_weight() -> list[Tensor | None]:
            if not num_rows:
                return [d_rows.new_zeros(0, d_rows.shape[-1])]
            if elsewhere is None:
                return [_row_sums(d_rows, local, num_rows, -1 if padding is None else padding)]
            # A row more, which gets nothing, is that of the tokens elsewhere: that saves a copy of all gradients.
            nowhere = elsewhere if padding is None else elsewhere | (local == padding)
            rows = local.masked_fill(nowhere, num_rows)
            return [_row_sums(d_rows, rows, num_rows + 1, num_rows)[:num_rows]]

        (now,) = now_or_later((ctx.weight,), (True,), d_weight)
        return now, None, None, None, None


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def _cleared(rows: Tensor, elsewhere: Tensor) -> Tensor:
    """``rows`` ``[..., h]`` with zeros where they are ``elsewhere`` ``[...]``, in place.

    By their bits: filling where a mask says so takes three times as long on a CPU, and what is not finite would be none
    of it times zero.
    """
    bits = _BITS[min(8, rows.element_size())]
    rows.view(bits).bitwise_and_(elsewhere.to(bits).sub_(1).unsqueeze(-1))  # all bits or none
    return rows


def _row_sums(d_rows: Tensor, rows: Tensor, num_rows: int, padding: int) -> Tensor:
    """``[num_rows, h]``: of each row the sum of its tokens' gradients, nothing for ``padding``."""
    return cast(Tensor, torch.ops.aten.embedding_dense_backward(d_rows, rows, num_rows, padding, False))


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Refuses ids outside ``0 .. size - 1``; looks only where that costs no waiting for a device."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{what}s of {ids.dtype}: they are whole numbers of torch.int64 or torch.int32; use .long()"
        )
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} {low if low < 0 else high} is outside the vocabulary of {size} (0 to {size - 1}); "
            "check that the tokenizer and the model agree on its size"
        )
