"""What the routers of a step add to its loss, and what they did.

Each layer of experts has losses of its own, and layers are on all stages of a pipeline, so these losses cannot go
through the loss of the last stage. Instead each is attached to its layer's output::

    forward     y, losses = experts(x)                   y goes on as it is
    backward    dy comes and goes on; losses get         coefficient * scale as their gradient

How often a value counts follows from the global batch, which a stage does not see, so whoever drives the step says it,
once, in a :class:`StepRouters`. It also collects what the routers did: a value for each layer of each micro-batch. A
block that is computed again in the backward pass writes the same values to the same place, so they count once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shardweave.comm import Axis, all_reduce
from shardweave.tensor_parallel import Routed

from .config import TransformerConfig

__all__ = ["MicroBatchRouters", "RouterStatistics", "StepRouters", "routers_of_pass"]


@dataclass(frozen=True, eq=False)
class RouterStatistics:
    """What the routers of all layers did in a step, over the global batch; on the CPU, the same on every rank."""

    loss: float
    """What was added to the step's loss, without its scale."""

    balance_loss: Tensor
    """``[layers]`` float64: mean over the sequences; 1 if all experts were used evenly."""

    z_loss: Tensor
    """``[layers]`` float64: mean over the tokens."""

    counts: Tensor
    """``[layers, experts]`` int64: tokens that chose each expert, those without room included."""

    dropped: Tensor
    """``[layers]`` int64: choices for which there was no room."""

    @property
    def dropped_share(self) -> float:
        """Of all choices, those for which there was no room; 0 of none."""
        return float(self.dropped.sum()) / max(float(self.counts.sum()), 1.0)

    @property
    def load(self) -> Tensor:
        """``[layers]`` float64: tokens of the busiest expert, as a multiple of the mean; 1 at best, 0 of none."""
        counts = self.counts.double()
        return counts.amax(-1) / counts.mean(-1).clamp(min=1.0 / counts.shape[-1])


class StepRouters:
    """One optimizer step's: made before it by every rank alike, and asked afterwards.

    To the gradient of the step's loss is added that of ``balance_loss`` times the mean over the ``sequences`` and
    ``router_z_loss`` times the mean over the ``tokens`` of the global batch, both added up over the layers, times
    ``scale``: what the loss itself is multiplied by beside its mean (a loss scale of float16; in a loop that averages
    gradients over data ranks, their number). Tokens are positions, those without a label included.

    ValueError: a model without experts, or a batch of nothing.
    """

    def __init__(self, config: TransformerConfig, *, sequences: int, tokens: int, scale: float = 1.0) -> None:
        if config.experts == 0:
            raise ValueError("StepRouters: the model has no experts (config.experts is 0); leave it out")
        if sequences < 1 or tokens < 1:
            raise ValueError(
                f"sequences: {sequences} and tokens: {tokens} are those of the global batch, each at least 1"
            )
        self._config, self._sequences, self._tokens = config, sequences, tokens
        self._balance = config.balance_loss * scale / sequences
        self._z = config.router_z_loss * scale / tokens
        self._micro_batches: list[MicroBatchRouters] = []

    def micro_batch(self) -> MicroBatchRouters:
        """A new one for each micro-batch of this rank, for all its stages."""
        self._micro_batches.append(MicroBatchRouters(self._balance, self._z))
        return self._micro_batches[-1]

    def statistics(
        self, world: Axis | None = None, *, device: torch.device | str | None = None
    ) -> RouterStatistics:
        """What the routers did, summed over ``world``: the axis of all ranks that take part (``mesh.world``).

        Each value is counted by one of the ranks that have it, so that one sum serves every layout. Collective;
        ``layers * (experts + 3)`` numbers. ``device``: for the message of a rank without layers; default: that of what
        was seen, or the CPU.
        """
        layers, experts = self._config.layers, self._config.experts
        seen = [row for one in self._micro_batches for row in one.rows]
        where = device if device is not None else seen[0][1].device if seen else "cpu"
        table = torch.zeros(layers, experts + 3, dtype=torch.float64, device=where)
        for layer, row in seen:
            table[layer] += row.to(where)
        total = table if world is None else all_reduce(table, world)
        total = total.cpu()
        balance, z = total[:, experts] / self._sequences, total[:, experts + 1] / self._tokens
        return RouterStatistics(
            loss=float(self._config.balance_loss * balance.sum() + self._config.router_z_loss * z.sum()),
            balance_loss=balance,
            z_loss=z,
            counts=total[:, :experts].round().long(),
            dropped=total[:, experts + 2].round().long(),
        )


class MicroBatchRouters:
    """One micro-batch's part of a :class:`StepRouters`, which makes it; to be handed to ``Transformer.forward``."""

    def __init__(self, balance: float, z: float) -> None:
        self._balance, self._z = balance, z
        self._seen: dict[int, Tensor] = {}

    @property
    def rows(self) -> list[tuple[int, Tensor]]:
        """Layers, and of each ``[experts + 3]`` float64: counts, balance loss, z-loss, dropped."""
        return list(self._seen.items())

    def attach(
        self, y: Tensor, routed: Routed, layer: int, *, own_tokens: bool, own_sequences: bool
    ) -> Tensor:
        """``y`` itself, with the losses of ``routed`` behind it; what was done is noted for ``layer``.

        ``own_tokens``, ``own_sequences``: whether this rank is the one that counts what is a sum over the tokens that
        it sees, and what is one over whole sequences.
        """
        counted = (
            (routed.balance_loss, own_sequences),
            (routed.z_loss, own_tokens),
            (routed.dropped, own_tokens),
        )
        numbers = torch.stack([number.detach().double() * own for number, own in counted])
        self._seen[layer] = torch.cat([routed.counts.double() * own_tokens, numbers])
        return cast(Tensor, _Attach.apply(y, routed.balance_loss, routed.z_loss, self._balance, self._z))  # type: ignore[no-untyped-call]


def routers_of_pass(
    config: TransformerConfig, given: MicroBatchRouters | None, *, training: bool
) -> MicroBatchRouters | None:
    """What the blocks are given in a forward pass: nothing in evaluation; in training nothing may be missing.

    Raises:
        ValueError: there are losses of routers, and nobody says how they count.
    """
    if config.experts == 0 or not training:
        return None
    if given is None and torch.is_grad_enabled() and (config.balance_loss or config.router_z_loss):
        raise ValueError(
            f"routers: the config has balance_loss {config.balance_loss} and router_z_loss {config.router_z_loss}, "
            "and how often they count only the caller knows: for each step make routers = StepRouters(config, "
            "sequences=..., tokens=...) of the global batch, and give routers=routers.micro_batch() to each call; "
            "or set both to 0"
        )
    if isinstance(given, StepRouters):
        raise ValueError(
            "routers: the step's object; give each micro-batch its own part, routers.micro_batch()"
        )
    return given


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, balance_loss: Tensor, z_loss: Tensor, balance: float, z: float
    ) -> Tensor:
        ctx.coefficients = (balance, z)
        ctx.save_for_backward(balance_loss, z_loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.full_like(loss, coefficient) if wanted and coefficient else None
            for loss, coefficient, wanted in zip(
                ctx.saved_tensors, ctx.coefficients, ctx.needs_input_grad[1:3], strict=True
            )
        ]
        return dy, *gradients, None, None
