"""An optimizer's state as whole tensors on one rank, for those who want one file.

It has the shape of torch's own state dicts, with names for parameters::

    state         parameter -> exp_avg, step, ...: full tensors on the CPU, for each parameter that has been in a step
    param_groups  settings, and under "params" the names, in the order of the groups
    masters       parameter -> the copy that is updated, where it is in another format than the parameter
    counters      torch class, skipped steps, loss scale

A plain torch optimizer loads it: ``load_state_dict`` by the order of its parameters, and
``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`` with ``full_state_dict=True`` by their names.

[Note: Never twice]
    The state of a large model fits the memory of one machine once. So the ranks first say what they have, and from that
    each knows what it is to send; then one after the other sends it in batches of bounded size, and each batch is
    copied into the tensors that are returned. Beside those there is one batch on the receiver and one on the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardweave.comm import (
    Axis,
    flat_rectangles,
    full_index,
    gather_values,
    receive,
    rectangle_views,
    send,
    sharding_of,
)
from shardweave.comm.devices import local_device

from ..optimizer import ZeroOptimizer
from ..shards import ShardPiece, settings
from .contents import check_names
from .scalars import decoded, encoded

__all__ = ["full_state_dict"]

_BATCH = 1 << 25
"""Bytes; a larger piece is a batch of its own."""

_MASTER = "master"
"""In place of a state's name."""


@torch.no_grad()
def full_state_dict(optimizer: ZeroOptimizer, *, world: Axis, rank: int = 0) -> dict[str, Any]:
    """The whole state of the optimizer on one rank; an empty dict on the others. See [Note: Never twice].

    Collective over ``world``, the axis of all ranks that train (``mesh.world``); ``rank``: position in it. Call it
    between steps. Residuals of compressed gradients are not in it; :func:`save_checkpoint` has them.

    ValueError, on all ranks: a parameter has no name of its own, a state has neither one number nor one for each
    element, or there are gradients that no step has used.
    """
    if not 0 <= rank < world.size:
        raise ValueError(f"rank={rank}: give a position on {world!r}, 0 to {world.size - 1}")
    told = gather_values(_inventory(optimizer), world)
    problems = list(dict.fromkeys(problem for one in told for problem in one["problems"]))
    if problems:
        raise ValueError("; ".join(problems[:5]))
    order = [rank, *(other for other in range(world.size) if other != rank)]
    plans = _shared_out({other: [_Entry.read(raw) for raw in told[other]["entries"]] for other in order})
    mine = _tensors(optimizer) if plans[world.rank] else {}
    if world.rank != rank:
        for batch in _batches(plans[world.rank]):
            send(torch.cat([mine[entry.key] for entry in batch]), world, rank)
        return {}
    assembly = _Assembly(told)
    for entry in plans[rank]:
        assembly.put(entry, mine[entry.key])
    for other in order[1:]:
        for batch in _batches(plans[other]):
            buffer = torch.empty(
                sum(entry.numel for entry in batch), dtype=batch[0].torch_dtype, device=local_device()
            )
            receive(buffer, world, other)
            for entry, flat in zip(batch, buffer.split([entry.numel for entry in batch]), strict=True):
                assembly.put(entry, flat)
    return assembly.packed(optimizer.counters())


@dataclass(frozen=True)
class _Entry:
    """A flat piece of one tensor, on one rank."""

    name: str
    state: str
    dtype: str
    full: tuple[int, ...]
    """Shape of the whole tensor."""
    local: tuple[int, ...]
    """Of the part that this rank's parameter is, ..."""
    origin: tuple[int, ...]
    """... which begins here."""
    begin: int
    """First element of the piece in the flattened part."""
    numel: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> _Entry:
        """From JSON."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**known)

    @property
    def key(self) -> tuple[str, str]:
        """Which tensor it is a piece of."""
        return self.name, self.state

    @property
    def place(self) -> tuple[object, ...]:
        """Which elements of it; equal on ranks that hold copies."""
        return self.key, self.origin, self.begin

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` in torch's terms."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def _inventory(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """What this rank has, as JSON holds it."""
    found: dict[str, Any] = {"entries": [], "numbers": {}, "groups": [], "problems": []}
    if optimizer.holds_gradients:
        found["problems"].append("there are gradients that no step has used: call it after optimizer.step()")
    try:
        check_names(optimizer)
        found["groups"] = [
            {
                "settings": {key: encoded(value) for key, value in settings(group).items()},
                "params": [optimizer.name_of(parameter) for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        for piece in optimizer.pieces():
            if piece.counts:
                _take_stock(piece, found)
    except (TypeError, ValueError) as error:
        found["problems"].append(str(error))
    return found


def _take_stock(piece: ShardPiece, found: dict[str, Any]) -> None:
    full = tuple(sharding_of(piece.parameter).shape)
    origin = tuple(where.start for where in full_index(piece.parameter))
    for state, value in _tensors_of(piece).items():
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == piece.values.shape:
            local, begin = tuple(piece.parameter.shape), piece.begin
            entry = _Entry(piece.name, state, dtype, full, local, origin, begin, value.numel())
        elif piece.whole:
            shape = tuple(value.shape)
            entry = _Entry(piece.name, state, dtype, shape, shape, (0,) * value.dim(), 0, value.numel())
        else:
            raise ValueError(
                f"state {state!r} of parameter {piece.name} is a tensor of shape {tuple(value.shape)}: neither one "
                "number nor one for each element, of a parameter that is spread over ranks"
            )
        found["entries"].append(asdict(entry))
    numbers = {key: encoded(value) for key, value in piece.state.items() if not _has_elements(value)}
    if numbers:
        found["numbers"][piece.name] = numbers


def _tensors_of(piece: ShardPiece) -> dict[str, Tensor]:
    tensors = {key: value for key, value in piece.state.items() if _has_elements(value)}
    if piece.values.dtype != piece.parameter.dtype:
        tensors[_MASTER] = piece.values
    return tensors


def _tensors(optimizer: ZeroOptimizer) -> dict[tuple[str, str], Tensor]:
    return {
        (piece.name, state): value.reshape(-1)
        for piece in optimizer.pieces()
        for state, value in _tensors_of(piece).items()
    }


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _shared_out(offers: Mapping[int, Sequence[_Entry]]) -> dict[int, list[_Entry]]:
    """Of equal pieces on several ranks the first one in order has to bring it."""
    taken: set[tuple[object, ...]] = set()
    plans: dict[int, list[_Entry]] = {}
    for rank, entries in offers.items():
        plans[rank] = [entry for entry in entries if entry.place not in taken]
        taken.update(entry.place for entry in entries)
    return plans


def _batches(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """What travels together: entries of one dtype, in their order."""
    batch: list[_Entry] = []
    size = 0
    for entry in entries:
        bytes_ = entry.numel * entry.torch_dtype.itemsize
        if batch and (entry.dtype != batch[0].dtype or size + bytes_ > _BATCH):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += bytes_
    if batch:
        yield batch


class _Assembly:
    """The state dict on the rank that gets it."""

    def __init__(self, told: Sequence[Mapping[str, Any]]) -> None:
        self._told = told
        self._full: dict[tuple[str, str], Tensor] = {}

    def put(self, entry: _Entry, flat: Tensor) -> None:
        """A piece, on whatever device, to its place."""
        if entry.key not in self._full:
            self._full[entry.key] = torch.empty(entry.full, dtype=entry.torch_dtype)
        blocks = flat_rectangles(entry.local, entry.begin, entry.begin + entry.numel)
        for block, view in zip(blocks, rectangle_views(flat, blocks), strict=True):
            self._full[entry.key][block.moved(entry.origin).index] = view.cpu()

    def packed(self, counters: Mapping[str, Any]) -> dict[str, Any]:
        """In torch's shape."""
        groups = self._groups()
        state: dict[str, dict[str, Any]] = {name: {} for group in groups for name in group["params"]}
        for one in self._told:
            for name, numbers in one["numbers"].items():
                state[name].update({key: decoded(value) for key, value in numbers.items()})
        masters: dict[str, Tensor] = {}
        for (name, key), tensor in self._full.items():
            (masters if key == _MASTER else state[name])[name if key == _MASTER else key] = tensor
        found = {"state": {name: of_one for name, of_one in state.items() if of_one}, "param_groups": groups}
        return found | ({"masters": masters} if masters else {}) | {"counters": dict(counters)}

    def _groups(self) -> list[dict[str, Any]]:
        """Each rank's groups under their numbers: settings of the first that has members, names of all."""
        groups: list[dict[str, Any]] = []
        for number in range(max(len(one["groups"]) for one in self._told)):
            of_ranks = [one["groups"][number] for one in self._told if number < len(one["groups"])]
            kept = next((group for group in of_ranks if group["params"]), of_ranks[0])
            names = list(dict.fromkeys(name for group in of_ranks for name in group["params"]))
            groups.append(
                {**{key: decoded(value) for key, value in kept["settings"].items()}, "params": names}
            )
        return groups
