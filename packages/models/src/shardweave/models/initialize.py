"""Values of parameters: initial ones that no layout can change, and where else they may come from.

Drawing each shard from a generator seeded by the rank makes every layout another run, and drawing on one
stream per process makes a value depend on what was drawn before it. Here a value depends on two things: the
seed and the canonical name of the parameter. Values are drawn in float32 and this rank keeps its
slice, so a split, a copied, a tied and a staged parameter all start from the same numbers, in every dtype up
to its rounding.

A large tensor is drawn in blocks of whole rows, each from its own number besides, and a rank draws the blocks that it
holds rows of: at most 16 MiB lie beside its slice, whatever the size of the whole. Of experts, which lie in one tensor,
each is drawn by itself, and only those of this rank are.

A :data:`Source` gives one parameter its values; :func:`fill` asks it for those of one module. So a model that no rank
could hold is created in shards, by an optimizer that makes and shards a few modules at a time, whether it is drawn
or read from files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardweave import comm
from shardweave.tensor_parallel import TopKRouter

from .config import TransformerConfig

__all__ = [
    "Constant",
    "Drawn",
    "Normal",
    "Source",
    "fill",
    "initial_rule",
    "initialize_module",
    "initialize_parameter",
]

Source = Callable[[nn.Parameter], None]
"""Gives a parameter the values of what this rank holds of it, by its sharding record; sends nothing."""

_BLOCK = 1 << 22
"""Elements drawn at once, or one row."""


@dataclass(frozen=True)
class Normal:
    """Independent draws from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


def initial_rule(config: TransformerConfig, name: str) -> Normal | Constant:
    """How the parameter with canonical name ``name`` starts.

    Biases are 0 and norm weights 1. Matrices have deviation ``init_std``; the two of each block that write to
    the residual stream have ``init_std / sqrt(2 * layers)`` (GPT-2 report, section 2.3).
    """
    owner, _, kind = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if kind == "bias":
        return Constant(0.0)
    if module == "norm" or module.endswith("_norm"):
        return Constant(1.0)
    if owner.endswith(("attention.output", "mlp.down")):
        return Normal(config.residual_std)
    return Normal(config.init_std)


@torch.no_grad()
def initialize_parameter(parameter: nn.Parameter, rule: Normal | Constant, seed: int) -> None:
    """Fill this rank's slice of ``parameter`` with its part of the value that ``rule`` and ``seed`` give.

    The parameter's sharding record must carry its canonical name and full shape (``comm.name_parameters``).
    """
    if isinstance(rule, Constant):
        parameter.fill_(rule.value)
        return
    sharding = comm.sharding_of(parameter)
    index = comm.full_index(parameter)
    if len(sharding.shape) < 3:
        _draw(parameter, sharding.shape, index, rule, seed, sharding.name)
        return
    for own, number in enumerate(range(index[0].start, index[0].stop)):  # [experts, out, in]
        _draw(parameter[own], sharding.shape[1:], index[1:], rule, seed, sharding.name, number)


def _draw(
    local: torch.Tensor,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    rule: Normal,
    *named: int | str,
) -> None:
    """Fills ``local`` with what lies at ``index`` of the tensor of ``shape`` that ``named`` determines."""
    rows = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    first, last = index[0].start, index[0].stop
    for block in range(first // rows, -(-last // rows)):
        begin, end = block * rows, min((block + 1) * rows, shape[0])
        # The first block is named as the whole tensor: of a smaller one, it is all there is.
        generator = comm.named_generator(*named, *((block,) if block else ()))
        values = torch.empty((end - begin, *shape[1:]), dtype=torch.float32)
        values.normal_(0.0, rule.std, generator=generator)
        low, high = max(begin, first), min(end, last)
        local[low - first : high - first].copy_(values[(slice(low - begin, high - begin), *index[1:])])


@dataclass(frozen=True)
class Drawn:
    """The :data:`Source` of a run that begins from nothing: :func:`initial_rule`, and ``seed``."""

    config: TransformerConfig
    seed: int

    def __call__(self, parameter: nn.Parameter) -> None:
        rule = initial_rule(self.config, comm.sharding_of(parameter).name)
        initialize_parameter(parameter, rule, self.seed)


@torch.no_grad()
def fill(module: nn.Module, source: Source) -> None:
    """Gives the parameters of ``module`` itself, not of modules inside it, their values from ``source``.

    A router's bias, which is no parameter, becomes 0. ``module.apply(functools.partial(fill, source=source))`` fills
    everything; as ``initialize=`` of a sharded optimizer the partial is called with one module after the other.

    Raises:
        ValueError: for a parameter on the meta device (materialise the module with ``to_empty`` first).
    """
    for local_name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            name = comm.sharding_of(parameter).name or local_name
            raise ValueError(
                f"{name} is on the meta device and holds no values; "
                "call to_empty(device=...) before initialize"
            )
        source(parameter)
    if isinstance(module, TopKRouter) and module.bias is not None:
        module.bias.zero_()


def initialize_module(module: nn.Module, config: TransformerConfig, seed: int) -> None:
    """Initialise every named parameter of ``module``, whichever part of the model it is, and its routers' biases.

    Raises:
        ValueError: for a parameter on the meta device (materialise the module with ``to_empty`` first).
    """
    source = Drawn(config, seed)
    for part in module.modules():
        fill(part, source)
