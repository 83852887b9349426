"""What the ranks of an axis have to give a layer alike, compared when it is first seen.

Tensors of unequal size end the process inside gloo, without a Python exception, and on NCCL hang; different tokens
train without an error, on a mixture. Both are mistakes of the first call (a sequence cut by hand, a sampler that was
given the global rank), so they are looked for there. Debug mode of ``comm`` compares the sizes of every call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardweave.comm import Axis, all_gather

from .eager import eager

__all__ = ["Alike", "refuse_wrapper"]


class Alike:
    """What a layer has compared so far."""

    def __init__(self) -> None:
        self._lengths: set[int] = set()
        self._tokens = False
        self._wrapper = False

    def check_parts(self, x: Tensor, axis: Axis, dim: int | None) -> None:
        """Every rank's part of the sequence is as long as this one's: asked for each length, when it is first seen.

        ``dim``: of the sequence; ``None``: it is whole. ValueError: on all ranks.
        """
        self._check_wrapper(axis)
        if dim is not None and axis.size > 1 and not x.is_meta:
            self._compare_lengths(x, axis, dim)

    @eager
    def _compare_lengths(self, x: Tensor, axis: Axis, dim: int) -> None:
        if not dim < x.dim() or x.shape[dim] in self._lengths:
            return
        length = x.shape[dim]
        lengths = all_gather(torch.tensor([length], device=x.device), axis).tolist()
        if len(set(lengths)) > 1:
            raise ValueError(
                f"input of shape {tuple(x.shape)}: the ranks of axis {axis.name!r} hold parts of {lengths} tokens "
                f"along sequence_dim {dim}, which have to be equal; pad the sequence to a multiple of {axis.size} "
                f"and cut it with shardweave.comm.scatter_to(x, axis, {dim})"
            )
        self._lengths.add(length)

    @torch.no_grad()
    def check_tokens(self, ids: Tensor, axis: Axis) -> None:
        """All ranks were given the same ids: asked once, at the first call.

        ValueError: on all ranks.
        """
        self._check_wrapper(axis)
        if self._tokens or axis.size == 1 or ids.is_meta:
            return
        flat = ids.reshape(-1).to(torch.int64)
        places = torch.arange(1, flat.numel() + 1, device=ids.device)
        own = torch.stack([flat.new_full((), flat.numel()), flat.sum(), (flat * places).sum()])
        told = all_gather(own.unsqueeze(0), axis).tolist()
        if any(numbers != told[0] for numbers in told):
            raise ValueError(
                f"the ranks of axis {axis.name!r} were given different token ids (of shape {tuple(ids.shape)} "
                "here). They work on one batch together: sample by mesh.data.rank of mesh.data.size, and not by the "
                "global rank"
            )
        self._tokens = True

    def _check_wrapper(self, axis: Axis) -> None:
        """Asked once: DistributedDataParallel, which gave all its ranks the first one's weights, has other ranks."""
        if not self._wrapper and axis.size > 1:
            refuse_wrapper(
                axis, "wrap it with process_group=mesh.data.group, the ranks that do hold the same"
            )
            self._wrapper = True


@eager
def refuse_wrapper(axis: Axis, remedy: str) -> None:
    """ValueError: the call comes through DistributedDataParallel over ranks that hold different slices."""
    # Where torch notes which wrapper's forward is running; private, so it may be gone some day.
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if not isinstance(wrapper, DistributedDataParallel):
        return
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    if len(set(ranks) & set(axis.ranks)) > 1:
        raise ValueError(
            f"DistributedDataParallel over ranks {ranks} has made equal, on ranks {list(axis.ranks)} of axis "
            f"{axis.name!r}, weights of which each holds another slice: build the module again, and {remedy}"
        )
