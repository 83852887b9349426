"""A :class:`Placed` for DCP's own planners, which know tensors and look for three methods on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .placed import Placed

if TYPE_CHECKING:  # and imported by whoever saves or loads, see `loading._read`
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["PlacedTensor"]


class PlacedTensor(Tensor):
    """A tensor in its full shape, of which this rank holds some rectangles; it has no memory of its own.

    ``torch.distributed.checkpoint.save`` writes them, ``load`` writes into them. Nothing can be computed with it.
    """

    placed: Placed
    flat: Tensor
    """The memory behind the rectangles."""

    @staticmethod
    def __new__(cls, placed: Placed, flat: Tensor) -> PlacedTensor:
        made: PlacedTensor = torch.Tensor._make_wrapper_subclass(
            cls, placed.shape, dtype=placed.dtype, device=flat.device
        )
        made.placed, made.flat = placed, flat
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} on a tensor of sharded_state_dict(): it stands for one that is spread over the ranks. Hand it to "
            "torch.distributed.checkpoint.save or load; full_state_dict() has tensors to look at"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        blocks = [(rectangle.offsets, rectangle.sizes) for rectangle, _ in self.placed.blocks]
        return f"PlacedTensor({self.placed.shape}, {self.placed.dtype}, here: {blocks})"

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        from .planning import write_items

        return list(write_items(name, self.placed))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from .planning import chunk_of

        return [chunk_of(rectangle) for rectangle, _ in self.placed.blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        blocks = self.placed.blocks
        return next(view for rectangle, view in blocks if rectangle.offsets == tuple(index.offset or ()))
