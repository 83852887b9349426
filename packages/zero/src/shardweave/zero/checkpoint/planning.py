"""DCP's planners over :class:`Placed` tensors.

``torch.distributed.checkpoint`` decides who writes which of several equal rectangles, checks that they fill every
tensor without overlap, and finds for each rectangle that a rank needs the saved ones that cover it. It knows tensors
by its own sharded types; ours are rectangles anyway, so only the three places where it looks at a tensor are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardweave.comm import Rectangle

from .manifest import Manifest
from .placed import Placed, PlacedTensors

__all__ = [
    "PlacedLoadPlanner",
    "PlacedSavePlanner",
    "chunk_of",
    "metadata_of",
    "rectangle_of",
    "write_items",
]


class PlacedSavePlanner(DefaultSavePlanner):
    """Plans the writing of this rank's rectangles; equal ones of several ranks are spread over them."""

    def __init__(self, tensors: PlacedTensors) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        items = [item for name, placed in self._tensors.items() for item in write_items(name, placed)]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        blocks = self._tensors[index.fqn].blocks
        return next(view for rectangle, view in blocks if rectangle.offsets == tuple(index.offset or ()))


class PlacedLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of all rectangles that this rank holds, from whatever rectangles were saved."""

    def __init__(self, tensors: PlacedTensors) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    def create_local_plan(self) -> LoadPlan:
        metadata = self.metadata
        assert metadata is not None  # DCP has set the planner up
        items: list[ReadItem] = []
        for name, placed in self._tensors.items():
            saved = metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)  # we write nothing else
            chunks = [chunk_of(rectangle) for rectangle, _ in placed.blocks]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None  # the position in the list of chunks given above
        view = self._tensors[index.fqn].blocks[index.index][1]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the tensor that was written to is the destination itself."""


def write_items(name: str, placed: Placed) -> Iterator[WriteItem]:
    """What this rank offers to write of a tensor."""
    for rectangle, view in placed.blocks if placed.writes else ():
        yield WriteItem(
            index=MetadataIndex(name, rectangle.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk_of(rectangle),
                properties=TensorProperties(dtype=view.dtype),
                size=torch.Size(placed.shape),
            ),
        )


def metadata_of(manifest: Manifest) -> Metadata:
    """A manifest as DCP wants to see it; chunks keep their order."""
    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
            size=torch.Size(entry.shape),
            chunks=[chunk_of(chunk.rectangle) for chunk in entry.chunks],
        )
        for name, entry in manifest.tensors.items()
    }
    return Metadata(state_dict_metadata=tensors)


def rectangle_of(chunk: ChunkStorageMetadata) -> Rectangle:
    """DCP's chunk in our terms."""
    return Rectangle(tuple(chunk.offsets), tuple(chunk.sizes))


def chunk_of(rectangle: Rectangle) -> ChunkStorageMetadata:
    """A rectangle in DCP's terms."""
    return ChunkStorageMetadata(torch.Size(rectangle.offsets), torch.Size(rectangle.sizes))
