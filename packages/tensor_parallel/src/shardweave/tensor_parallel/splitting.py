"""One layer and what takes its place: the parallel layer that holds this rank's slices of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Sharding, set_sharding, sharding_of

from .conv1d import ColumnParallelConv1D, RowParallelConv1D, features_of, is_conv1d
from .embedding import VocabParallelEmbedding
from .features import FeatureSplit, split_features, split_heads
from .fused import FusedLayers
from .layer import LOAD_WHOLE
from .linear import ColumnParallelLinear, RowParallelLinear, side_by_side
from .origins import LayerOrigin, keep_layer
from .overlap import Overlap
from .plans import Style
from .resizing import replace_values

__all__ = ["BlockColumnLinear", "LayerOptions", "split_layer"]


class BlockColumnLinear(FusedLayers):
    """A linear layer whose output consists of blocks, each split over the axis: ``[q; k; v]`` in one matrix.

    Input ``[..., in]``; output ``[..., blocks * block_r]``: this rank's part of each block, in order, so that
    the code that cut the output of the unsplit layer into blocks still does.
    """

    def __init__(
        self,
        in_features: int,
        blocks: Sequence[int],
        axis: Axis,
        *,
        bias: bool,
        sequence_dim: int | None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
    ) -> None:
        super().__init__()
        for index, features in enumerate(blocks):
            part = ColumnParallelLinear(
                in_features,
                features,
                axis,
                bias=bias,
                sequence_dim=sequence_dim,
                keep_inputs=keep_inputs,
                decomposed=decomposed,
                device="meta",
            )
            self.add_module(str(index), part)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any) -> None:
        prefix, *_, errors = arguments
        if f"{prefix}weight" in state_dict:
            errors.append(
                f"{prefix}weight is the whole of a matrix that is split in blocks here: {LOAD_WHOLE}."
            )
        super()._load_from_state_dict(state_dict, *arguments)

    def fused(self) -> Sequence[ColumnParallelLinear]:
        """The blocks, in order."""
        return [part for part in self.children() if isinstance(part, ColumnParallelLinear)]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., sum of this rank's parts]``."""
        return side_by_side(x, self.fused(), "this column-parallel layer")


@dataclass(frozen=True)
class LayerOptions:
    """What all layers that are split have in common, beside the axis."""

    sequence_dim: int | None = None
    keep_inputs: bool = False
    decomposed: bool | Overlap = False


def split_layer(old: nn.Module, style: Style, axis: Axis, options: LayerOptions, done: set[int]) -> nn.Module:
    """The parallel layer for ``old``, with its parameters cut down; ``done`` has the ids of those already cut."""
    if style.blocks > 1:
        new = _split_blocks(old, style.blocks, axis, options)
    else:
        new = _empty_layer(old, style, axis, options)
        for name, parameter in list(old.named_parameters(recurse=False)):
            record = sharding_of(new.get_parameter(name))
            if id(parameter) not in done:
                done.add(id(parameter))
                _cut(parameter, record, new.get_parameter(name).shape)
            new.register_parameter(name, parameter)
    keep_layer(new, LayerOrigin(old, axis, transposed=style.blocks > 1 and is_conv1d(old)))
    for name, _ in list(old.named_parameters(recurse=False)):
        old.register_parameter(name, None)
    return new.train(old.training)


def _empty_layer(old: nn.Module, style: Style, axis: Axis, options: LayerOptions) -> nn.Module:
    """The parallel layer for ``old``, without values."""
    sequence_dim = options.sequence_dim
    if isinstance(old, nn.Embedding):
        return VocabParallelEmbedding(
            old.num_embeddings,
            old.embedding_dim,
            axis,
            padding_idx=old.padding_idx,
            sequence_dim=sequence_dim,
            device="meta",
        )
    inputs, outputs = features_of(old)
    if style.is_row:
        split = _split_features(inputs, style, axis)
        if is_conv1d(old):
            return RowParallelConv1D(
                split, outputs, axis, sequence_dim=sequence_dim, decomposed=options.decomposed, device="meta"
            )
        return RowParallelLinear(
            split,
            outputs,
            axis,
            bias=old.bias is not None,
            sequence_dim=sequence_dim,
            decomposed=options.decomposed,
            device="meta",
        )
    split, gather_output = _split_features(outputs, style, axis), style.kind == "column_gather"
    if is_conv1d(old):
        return ColumnParallelConv1D(
            inputs,
            split,
            axis,
            gather_output=gather_output,
            sequence_dim=sequence_dim,
            keep_inputs=options.keep_inputs,
            decomposed=options.decomposed,
            device="meta",
        )
    return ColumnParallelLinear(
        inputs,
        split,
        axis,
        bias=old.bias is not None,
        gather_output=gather_output,
        sequence_dim=sequence_dim,
        keep_inputs=options.keep_inputs,
        decomposed=options.decomposed,
        device="meta",
    )


def _split_features(features: int, style: Style, axis: Axis) -> FeatureSplit:
    if style.kind in ("column_heads", "row_heads"):
        return split_heads(features // style.unit, style.unit, axis)
    return split_features(features, axis)


def _split_blocks(old: nn.Module, blocks: int, axis: Axis, options: LayerOptions) -> nn.Module:
    inputs, outputs = features_of(old)
    size = outputs // blocks
    new = BlockColumnLinear(
        inputs,
        [size] * blocks,
        axis,
        bias=old.bias is not None,
        sequence_dim=options.sequence_dim,
        keep_inputs=options.keep_inputs,
        decomposed=options.decomposed,
    )
    own = split_features(size, axis).index
    for index, part in enumerate(new.fused()):
        for name, parameter in list(old.named_parameters(recurse=False)):
            rows = parameter.detach().t() if is_conv1d(old) else parameter.detach()
            block = rows[index * size : (index + 1) * size][own]
            cut = nn.Parameter(
                block.clone(memory_format=torch.contiguous_format), requires_grad=parameter.requires_grad
            )
            before, record = sharding_of(parameter), sharding_of(part.get_parameter(name))
            if before.name:
                record = replace(record, name=f"{before.name.removesuffix(name)}{index}.{name}")
            set_sharding(cut, replace(record, partial=(*before.partial, *record.partial), decay=before.decay))
            part.register_parameter(name, cut)
    new.place()
    return new


def _cut(parameter: nn.Parameter, record: Sharding, shape: torch.Size) -> None:
    """Replaces the parameter's data by its slice; what was recorded about other axes stays."""
    starts = [0] * parameter.dim()
    for split in record.splits:
        starts[split.dim] = split.offset
    index = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
    replace_values(parameter, parameter.detach()[index].clone())
    before = sharding_of(parameter)
    set_sharding(
        parameter,
        replace(before, shape=record.shape, splits=record.splits, partial=(*before.partial, *record.partial)),
    )
