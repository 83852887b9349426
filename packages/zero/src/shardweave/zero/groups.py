"""Parameter groups: what users may give, what each parameter is called, and which of them decay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import sharding_of
from shardweave.comm.devices import local_device

__all__ = ["Given", "decay_groups", "in_words", "is_place", "listed", "parameter_names"]


def listed(params: Iterable[Any]) -> list[Any]:
    """The argument of a torch optimizer with its iterators written out, so that it can be read twice.

    Parameters, ``(name, parameter)`` pairs, or groups: dicts with such under ``"params"``.
    """
    if isinstance(params, Tensor):
        raise ValueError(
            "ZeroOptimizer was given one tensor; give an iterable of parameters, [parameter] for one"
        )
    entries = list(params)
    if not entries:
        raise ValueError(
            "ZeroOptimizer was given no parameters; has module.parameters() been used up before? On a rank that is "
            "to have none, give [{'params': []}]"
        )
    groups: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            members = entry["params"]
            entry = {**entry, "params": [members] if isinstance(members, Tensor) else list(members)}
        groups.append(entry)
    flat = [p for entry in groups for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in flat]
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError("a parameter was given to ZeroOptimizer twice; give each once, in one group")
    return groups


def decay_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, **settings: Any
) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, norm weights, biases and scalars without.

    What a parameter is follows from its sharding record (the full tensor's number of dims, or an explicit
    ``decay``), never from a flattened or sliced local shape. ``settings`` go into both groups.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if sharding_of(parameter).decays else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, **settings},
        {"params": others, "weight_decay": 0.0, **settings},
    ]


@dataclass(frozen=True)
class Given:
    """What an optimizer was given, on this rank."""

    parameters: tuple[nn.Parameter, ...]
    """Of all groups, in their order."""
    names: Mapping[int, str]
    """Of each parameter, by ``id``, in the same order."""
    group_of: Mapping[int, int]
    """The number of each parameter's group, by ``id``."""
    num_groups: int
    modules: tuple[nn.Module, ...]
    """The trees that the parameters are in, as far as they are known."""
    device: torch.device
    """Where units are; of a rank without parameters too, which takes part in what the others decide."""
    settings: tuple[str, ...] = ()
    """Of the groups, in words: rates and the like, which are to be alike on all data ranks."""

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]], modules: Sequence[nn.Module]) -> Given:
        """From torch's parameter groups."""
        parameters = tuple(p for group in groups for p in group["params"])
        device = parameters[0].device if parameters else torch.device("cpu")
        return cls(
            parameters,
            parameter_names(groups, modules),
            {id(p): number for number, group in enumerate(groups) for p in group["params"]},
            len(groups),
            tuple(modules),
            local_device() if device.type == "meta" else device,
        )

    def names_of(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """In the order of ``parameters``."""
        return [self.names[id(parameter)] for parameter in parameters]


def settings_in_words(groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the groups have beside parameters, as far as it is numbers and text."""
    plain = (bool, int, float, str, tuple, type(None))
    return tuple(
        f"{key}={value!r} in parameter group {number}"
        for number, group in enumerate(groups)
        for key, value in sorted(group.items())
        if key != "params" and isinstance(value, plain)
    )


def is_place(name: str) -> bool:
    """Whether :func:`parameter_names` made the name up from a place: it means nothing on other ranks."""
    return re.fullmatch(r"group\d+\.\d+", name) is not None


def in_words(group: Mapping[str, Any], modules: Sequence[nn.Module]) -> str:
    """The members of a group that is none of the optimizer's, for a message."""
    names = _names_in(modules)
    members = group["params"]
    found = []
    for member in [members] if isinstance(members, Tensor) else list(members):
        own, parameter = member if isinstance(member, tuple) else ("", member)
        name = sharding_of(parameter).name or own or names.get(id(parameter), "")
        found.append(name or f"one of shape {tuple(parameter.shape)}")
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def parameter_names(groups: Sequence[Mapping[str, Any]], modules: Sequence[nn.Module] = ()) -> dict[int, str]:
    """A unique name for every parameter, by ``id``.

    The sharding record's canonical name; else the one given to the optimizer with the parameter; else its name in the
    module, if there is one module; else its place in the groups (``group0.3``).
    """
    in_module = _names_in(modules)
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(groups):
        given = group.get("param_names", [""] * len(group["params"]))
        for place, (parameter, own) in enumerate(zip(group["params"], given, strict=True)):
            name = sharding_of(parameter).name or own or in_module.get(id(parameter), "")
            if not name or name in taken:
                name = f"group{number}.{place}"
            taken.add(name)
            names[id(parameter)] = name
    return names


def _names_in(modules: Sequence[nn.Module]) -> dict[int, str]:
    """By ``id``; of several modules, a pipeline rank's, none: theirs would be the same on each stage."""
    if len(modules) != 1:
        return {}
    return {id(parameter): name for name, parameter in modules[0].named_parameters()}
