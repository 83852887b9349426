"""Linear layers that keep their weight the other way round: ``[in, out]``, as GPT-2 does.

transformers calls them ``Conv1D``. They compute what a linear layer computes, but a rank's output features are
columns of the weight here, not rows. The parameter keeps its orientation when it is split, so that it stays the same
object with the same name and its record tells the shape that a checkpoint has. transformers itself is not needed: a
``Conv1D`` is recognised by its name and its shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Sharding

from .alike import Alike
from .features import FeatureSplit
from .layer import ParallelLayer
from .linear import check_features, check_row_input
from .overlap import Overlap, column_in_pieces, row_in_pieces
from .products import column_linear, gathered_features, row_linear

__all__ = ["ColumnParallelConv1D", "RowParallelConv1D", "features_of", "is_conv1d"]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' ``Conv1D``: ``weight`` ``[in, nf]`` and ``bias`` ``[nf]``."""
    features, weight = getattr(module, "nf", None), getattr(module, "weight", None)
    named = type(module).__name__ == "Conv1D"
    return named and isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == features


def features_of(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer or a ``Conv1D``."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = module.get_parameter("weight").shape
    return inputs, outputs


class ColumnParallelConv1D(ParallelLayer):
    """:class:`ColumnParallelLinear` with ``weight`` ``[in, out_r]``.

    Its parameters are not initialised: they come from the layer that it replaces.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        in_features: int,
        split: FeatureSplit,
        axis: Axis,
        *,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.split = in_features, split.features, split
        self.axis, self.gather_output, self.sequence_dim = axis, gather_output, sequence_dim
        self.keep_inputs, self.decomposed = keep_inputs, decomposed
        self.alike = Alike()
        records = {
            "weight": split.sharding(axis, (in_features, split.features), 1),
            "bias": split.sharding(axis, (split.features,), 0),
        }
        shapes = {"weight": (in_features, split.length), "bias": (split.length,)}
        self._new_parameters(records, shapes, device, None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out_r]`` (or ``[..., out]``)."""
        check_features(x, self.in_features, "this column-parallel layer")
        self.alike.check_parts(x, self.axis, self.sequence_dim)
        y = column_linear(
            x,
            (self.weight.t(),),
            (self.bias,),
            self.axis,
            sequence_dim=self.sequence_dim,
            keep_inputs=self.keep_inputs,
            decomposed=column_in_pieces(self.decomposed, x, self.out_features * self.split.copies, self.axis),
        )
        if not self.gather_output:
            return y
        return gathered_features(y, self.out_features, self.axis)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features} (here {self.split.length}), "
            f"axis={self.axis.name}:{self.axis.size}"
        )


class RowParallelConv1D(ParallelLayer):
    """:class:`RowParallelLinear` with ``weight`` ``[in_r, out]``.

    Its parameters are not initialised: they come from the layer that it replaces.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        split: FeatureSplit,
        out_features: int,
        axis: Axis,
        *,
        sequence_dim: int | None = None,
        decomposed: bool | Overlap = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.split = split.features, out_features, split
        self.axis, self.sequence_dim, self.decomposed = axis, sequence_dim, decomposed
        partial = (axis,) if sequence_dim is not None and axis.size > 1 else ()
        records = {
            "weight": split.sharding(axis, (split.features, out_features), 0),
            "bias": Sharding("", (out_features,), partial=partial),
        }
        shapes = {"weight": (split.length, out_features), "bias": (out_features,)}
        self._new_parameters(records, shapes, device, None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_r]`` to ``[..., out]``, or this rank's part of it along ``sequence_dim``."""
        check_row_input(x, self.split, self.axis)
        return row_linear(
            x,
            self.weight.t(),
            self.bias,
            self.axis,
            sequence_dim=self.sequence_dim,
            decomposed=row_in_pieces(self.decomposed, x, self.in_features, self.out_features, self.axis),
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} (here {self.split.length}), out_features={self.out_features}, "
            f"axis={self.axis.name}:{self.axis.size}"
        )
