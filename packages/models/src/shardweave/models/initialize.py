"""Initial values that no layout can change.

Drawing each shard from a generator seeded by the rank makes every layout another run, and drawing on one
stream per process makes a value depend on what was drawn before it. Here a value depends on two things: the
seed and the canonical name of the parameter. The whole tensor is drawn in float32 and this rank keeps its
slice, so a split, a copied, a tied and a staged parameter all start from the same numbers, in every dtype up
to its rounding.

The price is that a rank draws one full tensor at a time: the largest is the embedding's. Of experts, which lie in one
tensor, each is drawn by itself, from its number besides, and only those of this rank are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardweave import comm
from shardweave.tensor_parallel import TopKRouter

from .config import TransformerConfig

__all__ = ["Constant", "Normal", "initial_rule", "initialize_module", "initialize_parameter"]


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
        parameter.copy_(_drawn(sharding.shape, rule, seed, sharding.name)[index])
        return
    for own, number in enumerate(range(index[0].start, index[0].stop)):  # [experts, out, in]
        parameter[own].copy_(_drawn(sharding.shape[1:], rule, seed, sharding.name, number)[index[1:]])


def _drawn(shape: tuple[int, ...], rule: Normal, *named: int | str) -> torch.Tensor:
    full = torch.empty(shape, dtype=torch.float32)
    return full.normal_(0.0, rule.std, generator=comm.named_generator(*named))


@torch.no_grad()
def initialize_module(module: nn.Module, config: TransformerConfig, seed: int) -> None:
    """Initialise every named parameter of ``module``, whichever part of the model it is, and its routers' biases.

    Raises:
        ValueError: for a parameter on the meta device (materialise the module with ``to_empty`` first).
    """
    for local_name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{local_name} is on the meta device and holds no values; "
                "call to_empty(device=...) before initialize"
            )
        initialize_parameter(parameter, initial_rule(config, comm.sharding_of(parameter).name), seed)
    for part in module.modules():
        if isinstance(part, TopKRouter) and part.bias is not None:
            part.bias.zero_()
