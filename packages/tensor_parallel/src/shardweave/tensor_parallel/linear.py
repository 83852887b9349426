"""Linear layers that hold a slice of their weight.

``nn.Linear`` keeps the whole matrix on every rank. A column-parallel layer keeps some output features, a
row-parallel layer some input features, and one after the other they need a single sum over the ranks, since
the slices of the first's output are the slices of the second's input. "Column" and "row" are those of the
matrix A in Y = X A of Shoeybi et al., section 3 (arXiv:1909.08053); ``weight`` is its transpose, as in
``nn.Linear``::

    x [.., in] --column--> [.., ffn/n] --activation--> [.., ffn/n] --row--> sum over ranks --> y [.., out]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Sharding

from .alike import Alike
from .asking import check_sequence_dim
from .features import FeatureSplit, feature_split
from .layer import ParallelLayer
from .overlap import Overlap, column_in_pieces, row_in_pieces
from .products import column_linear, gathered_features, row_linear

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(ParallelLayer):
    """``nn.Linear`` whose output features are split over an axis.

    This rank holds ``weight`` ``[out_r, in]`` and ``bias`` ``[out_r]``. Input ``[..., in]``, the same on
    every rank; output ``[..., out_r]``, or ``[..., out]`` with ``gather_output``. Backward sums the input's
    gradient over the axis, while the weight's is computed.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the whole output, split in balanced parts; or a :class:`FeatureSplit` that says
            which slice this rank holds (heads that ranks share).
        axis: the ranks that share the weight.
        bias: whether there is one.
        gather_output: whether to return all output features on every rank.
        sequence_dim: with sequence parallelism the input is this rank's part along this dimension (equal
            parts); forward gathers it, the output has the whole sequence, backward reduce-scatters.
        keep_inputs: with sequence parallelism, whether the gathered input is kept for the backward pass: one
            all-gather less there, for the memory of the whole input in place of a part's.
        decomposed: with sequence parallelism, whether the product is computed piece by piece while the other pieces
            travel; an :class:`Overlap` says it for each input, from its size. The same on every rank.
        device: as in ``nn.Linear``.
        dtype: as in ``nn.Linear``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | FeatureSplit,
        axis: Axis,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        split = feature_split(out_features, axis, "out_features")
        check_sequence_dim(sequence_dim)
        if gather_output and split.copies > 1:
            raise ValueError("gather_output with features that ranks share would return them several times")
        self.in_features, self.out_features, self.split = in_features, split.features, split
        self.axis, self.gather_output, self.sequence_dim = axis, gather_output, sequence_dim
        self.keep_inputs, self.decomposed = keep_inputs, decomposed
        self.alike = Alike()
        records = {"weight": split.sharding(axis, (split.features, in_features), 0)}
        if bias:
            records["bias"] = split.sharding(axis, (split.features,), 0)
        else:
            self.register_parameter("bias", None)
        shapes = {"weight": (split.length, in_features), "bias": (split.length,)}
        self._new_parameters(records, shapes, device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws what ``nn.Linear`` would draw, whole, and keeps this rank's slice.

        Ranks whose default generators are in the same state so hold slices of one matrix, and it is the
        matrix of the unsplit layer.
        """
        whole = _whole_linear(self)
        self.weight.copy_(whole.weight[self.split.index])
        if self.bias is not None:
            self.bias.copy_(whole.bias[self.split.index])

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out_r]`` (or ``[..., out]``).

        Raises:
            ValueError: when the input's last dimension is not ``in_features``.
        """
        y = side_by_side(x, (self,), "this column-parallel layer")
        if not self.gather_output:
            return y
        return gathered_features(y, self.out_features, self.axis)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features} (here {self.split.length}), "
            f"bias={self.bias is not None}, axis={self.axis.name}:{self.axis.size}"
        )


def side_by_side(x: Tensor, layers: Sequence[ColumnParallelLinear], whose: str) -> Tensor:
    """The outputs of layers that read one input alike, side by side, from one product; ``whose``, for an error."""
    first = layers[0]
    check_features(x, first.in_features, whose)
    first.alike.check_parts(x, first.axis, first.sequence_dim)
    features = sum(layer.out_features * layer.split.copies for layer in layers)
    return column_linear(
        x,
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
        first.axis,
        sequence_dim=first.sequence_dim,
        keep_inputs=first.keep_inputs,
        decomposed=column_in_pieces(first.decomposed, x, features, first.axis),
    )


class RowParallelLinear(ParallelLayer):
    """``nn.Linear`` whose input features are split over an axis.

    This rank holds ``weight`` ``[out, in_r]`` and the whole ``bias`` ``[out]``. Input ``[..., in_r]``, as a
    column-parallel layer gives it; output ``[..., out]``: the sum over the axis, plus the bias once.

    Args:
        in_features: size of the whole input, split in balanced parts; or a :class:`FeatureSplit`.
        out_features: size of the output's last dimension.
        axis: the ranks that share the weight.
        bias: whether there is one.
        sequence_dim: with sequence parallelism the output is this rank's part along this dimension, by
            reduce-scatter. The bias then sees this rank's tokens only: its gradient is partial over the axis.
        decomposed: as in :class:`ColumnParallelLinear`.
        device: as in ``nn.Linear``.
        dtype: as in ``nn.Linear``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int | FeatureSplit,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = True,
        sequence_dim: int | None = None,
        decomposed: bool | Overlap = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        split = feature_split(in_features, axis, "in_features")
        check_sequence_dim(sequence_dim)
        if split.copies > 1:
            raise ValueError(
                "input features that ranks share would be summed several times; split them instead"
            )
        self.in_features, self.out_features, self.split = split.features, out_features, split
        self.axis, self.sequence_dim, self.decomposed = axis, sequence_dim, decomposed
        records = {"weight": split.sharding(axis, (out_features, split.features), 1)}
        if bias:
            partial = (axis,) if sequence_dim is not None and axis.size > 1 else ()
            records["bias"] = Sharding("", (out_features,), partial=partial)
        else:
            self.register_parameter("bias", None)
        shapes = {"weight": (out_features, split.length), "bias": (out_features,)}
        self._new_parameters(records, shapes, device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws what ``nn.Linear`` would draw, whole, and keeps this rank's slice."""
        whole = _whole_linear(self)
        self.weight.copy_(whole.weight[:, self.split.index])
        if self.bias is not None:
            self.bias.copy_(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_r]`` to ``[..., out]``, or this rank's part of it along ``sequence_dim``.

        Raises:
            ValueError: when the last dimension is not this rank's part of ``in_features``, or the sequence
                does not divide over the axis.
        """
        check_row_input(x, self.split, self.axis)
        return row_linear(
            x,
            self.weight,
            self.bias,
            self.axis,
            sequence_dim=self.sequence_dim,
            decomposed=row_in_pieces(self.decomposed, x, self.in_features, self.out_features, self.axis),
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} (here {self.split.length}), out_features={self.out_features}, "
            f"bias={self.bias is not None}, axis={self.axis.name}:{self.axis.size}"
        )


def check_features(x: Tensor, features: int, whose: str) -> None:
    """Refuses an input with another last dimension than the layer expects."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"input of shape {tuple(x.shape)}: {whose} takes {features} features in the last dimension"
        )


def check_row_input(x: Tensor, split: FeatureSplit, axis: Axis) -> None:
    """Refuses an input of a row-parallel layer that is not this rank's part of its features."""
    if x.dim() and x.shape[-1] == split.features != split.length:
        raise ValueError(
            f"input of shape {tuple(x.shape)}: all {split.features} features, of which a row-parallel layer takes this "
            f"rank's {split.length}: those that a column-parallel layer before it gives, or "
            f"shardweave.comm.scatter_to(x, axis, {x.dim() - 1}) for an input that every rank of {axis.name!r} has "
            f"whole"
        )
    whose = f"this row-parallel layer, fed by a column-parallel one with {split.features} in all,"
    check_features(x, split.length, whose)


def _whole_linear(layer: ColumnParallelLinear | RowParallelLinear) -> nn.Linear:
    return nn.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
