"""Several column-parallel layers that read the same input, computed as one.

Query, key and value (gate and up) are separate layers here, each with its own parameters and records, which
lie one behind the other in memory. So there is one gather of the input, one product, and one reduction of the
input's gradient, where three separate layers would have three of each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardweave.comm import Axis

from .adjacency import joined, place_adjacent
from .features import FeatureSplit
from .layer import ParallelLayer
from .linear import ColumnParallelLinear, side_by_side
from .overlap import Overlap

__all__ = ["FusedColumnLinear", "FusedLayers", "fused_linear"]


def fused_linear(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The outputs of several column-parallel layers for the same input, from one product.

    ``x``: ``[..., in]`` as the layers take it; returns one ``[..., out_r]`` per layer, in their order (views
    of one tensor). The layers share axis, sequence dimension and having a bias or not, and do not gather.
    """
    y = side_by_side(x, layers, "these fused layers")
    return torch.split(y, [layer.weight.shape[0] for layer in layers], dim=-1)


class FusedLayers(ParallelLayer):
    """Base of modules whose column-parallel layers read one input: keeps their weights adjacent in memory.

    A subclass names the layers in :meth:`fused`, calls :meth:`place` once they exist, and computes them with
    :func:`fused_linear`. Moving the module (``.to``, ``to_empty``, ``deepcopy``) places them again. The layers'
    own ``forward``, and hooks on it, are not run.
    """

    @abstractmethod
    def fused(self) -> Sequence[ColumnParallelLinear]:
        """The layers that are computed together, in order."""

    def place(self) -> None:
        """Puts weights behind weights and biases behind biases in memory; values and objects stay.

        Raises:
            ValueError: when the layers do not read the same input in the same way.
        """
        _check_alike(self.fused())
        for group in self._groups():
            place_adjacent(group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._together()
        super()._apply(fn, recurse)
        self._place_again(before)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = super().__deepcopy__(memo)
        copy._place_again(self._together())
        return copy

    def _groups(self) -> list[list[nn.Parameter]]:
        """What lies together: weights behind weights, biases behind biases."""
        layers = self.fused()
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return [[layer.weight for layer in layers], *([biases] if biases else [])]

    def _together(self) -> list[bool]:
        """Which groups lie together now, or would if they had memory."""
        return [group[0].is_meta or joined(group) is not None for group in self._groups()]

    def _place_again(self, before: Sequence[bool]) -> None:
        """Only what lay together: parameters that an optimizer took into its own buffers stay there."""
        for group, together in zip(self._groups(), before, strict=True):
            if together:
                place_adjacent(group)


class FusedColumnLinear(FusedLayers):
    """Named column-parallel layers over one input, for example ``{"query": 64, "key": 16, "value": 16}``.

    Each part is a :class:`ColumnParallelLinear` of that name, so parameters are called ``query.weight`` and
    so on. Input ``[..., in]``; output a tuple of ``[..., out_r]``, one per part. Without copies of heads,
    part ``i`` is split in balanced parts; pass a :class:`FeatureSplit` (from ``split_heads``) to split
    between heads.

    Args:
        in_features: size of the input's last dimension.
        parts: name of each part and its output features, whole.
        axis: the ranks that share the weights.
        bias: whether every part has one.
        sequence_dim: as in :class:`ColumnParallelLinear`.
        keep_inputs: as there; the parts keep one input together.
        decomposed: as there; of the one product.
        device: as in ``nn.Linear``.
        dtype: as in ``nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | FeatureSplit],
        axis: Axis,
        *,
        bias: bool = True,
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(parts, Mapping) or not parts:
            raise ValueError(
                f"parts={parts!r}: a fused layer needs at least one part, by name, such as {{'query': 64, 'key': 16}}"
            )
        self.names = tuple(parts)
        for name, features in parts.items():
            part = ColumnParallelLinear(
                in_features,
                features,
                axis,
                bias=bias,
                sequence_dim=sequence_dim,
                keep_inputs=keep_inputs,
                decomposed=decomposed,
                device=device,
                dtype=dtype,
            )
            self.add_module(name, part)
        self.place()

    def fused(self) -> Sequence[ColumnParallelLinear]:
        """The parts, in order."""
        children = dict(self.named_children())
        return [part for name in self.names if isinstance(part := children[name], ColumnParallelLinear)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[..., in]`` to one ``[..., out_r]`` per part, in the order in which they were given."""
        return fused_linear(x, self.fused())


def _check_alike(layers: Sequence[ColumnParallelLinear]) -> None:
    first = layers[0]
    for layer in layers:
        if layer.gather_output:
            raise ValueError(
                "a fused layer cannot gather its output; gather it outside, or use the layers one by one"
            )
        for name in ("in_features", "axis", "sequence_dim", "keep_inputs", "decomposed"):
            if getattr(layer, name) != getattr(first, name):
                raise ValueError(
                    f"fused layers read one input, but {name} is {getattr(first, name)} in one "
                    f"and {getattr(layer, name)} in another"
                )
