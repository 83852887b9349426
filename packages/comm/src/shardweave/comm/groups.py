"""The process groups of a mesh: built by all ranks in one order, shared by members, destroyed at the end.

[Note: One order]
    ``new_group`` has to be called by every rank of the world, also by those that are not in it, in the same order:
    a rank that calls it for its own groups only takes part in a later group under an earlier one's name, which
    works by luck or blocks. So groups are asked for as a *partition* of the world, all parts of it at once.

[Note: Destroyed, not forgotten]
    A gloo group that is dropped keeps its sockets, and a thread for each; one that is destroyed leaves nothing.
    None of a mesh's groups is the default group: two meshes over one world would share that one, and it has
    another timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

__all__ = ["Groups"]


class Groups:
    """Builds and owns the process groups of one mesh, as one rank sees them.

    ``device``: of the tensors that travel. ``timeout``: seconds, of every group. torch would give sub-groups its
    default of 30 minutes whatever ``init_process_group`` was told.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device = device
        self._timeout = timedelta(seconds=timeout)
        self._built: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
        """Of all ranks' groups, ``None`` for those that this rank is not in: whether to build one is decided alike."""

    def split(self, parts: Iterable[Sequence[int]], use: str = "") -> dist.ProcessGroup | None:
        """The group of the part that this rank is in; ``None`` when it is alone there or in none.

        ``parts``: disjoint lists of global ranks, the same on every rank; a group's ranks are in the order given.
        Groups with the same members and the same ``use`` are one. Collective over the world: see [Note: One order].
        """
        mine = None
        for part in parts:
            members = tuple(part)
            if len(members) < 2:
                continue
            if (use, members) not in self._built:
                self._built[use, members] = self._build(members)
            mine = mine or self._built[use, members]
        return mine

    def close(self) -> None:
        """Destroys all of them. See [Note: Destroyed, not forgotten]."""
        while self._built:
            _, group = self._built.popitem()
            if group is not None:
                dist.destroy_process_group(group)

    def _build(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """With a timeout that holds from the group's creation on.

        Changing it later (``_set_pg_timeout``) reaches gloo's collectives, not its sends and receives, which would
        then wait for torch's default of 30 minutes.
        """
        options: C10dBackend.Options
        if self.device.type == "cuda":
            name, options = "nccl", dist.ProcessGroupNCCL.Options()
        else:
            name, options = "gloo", dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        options._timeout = self._timeout
        group = dist.new_group(
            list(members), timeout=self._timeout, backend=name, pg_options=options, sort_ranks=False
        )
        return group if isinstance(group, dist.ProcessGroup) else None
