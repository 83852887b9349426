"""Which rank runs on which host: equal parts, neighbours together, as torchrun and srun place them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place", "place"]


@dataclass(frozen=True)
class Place:
    """Where one rank of a group runs."""

    host: int
    local_rank: int
    """Position among the ranks of its host."""
    local_size: int


def place(rank: int, ranks: int, hosts: int) -> Place:
    """The place of ``rank`` of ``ranks`` on ``hosts``: with 8 ranks on 2 hosts, ranks 0 to 3 share host 0."""
    if ranks % hosts != 0:
        raise ValueError(
            f"{ranks} ranks on {hosts} hosts: each host has equally many; use a multiple of {hosts} ranks"
        )
    size = ranks // hosts
    return Place(rank // size, rank % size, size)
