"""The module that the programs train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ATTENTION", "LAYERS", "WIDTH", "Interrupted", "Net", "fails", "inputs", "matrix_of", "net_of"]

WIDTH = 7
LAYERS = 9
ATTENTION = 4


class Interrupted(Exception):
    """What a program raises itself."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Interrupted


class Tied(nn.Module):
    """Uses another layer's weight, transposed, with a bias of its own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Block(nn.Module):
    """Layers inside a layer, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 5)
        self.up = nn.Linear(5, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(torch.tanh(self.down(x))) * self.gain
        return out


class Attention(nn.Module):
    """torch's own, which reads parameters of its submodules without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        out: Tensor = self.inner(x, x, x)[0][:, 0]
        return out


class Net(nn.Module):
    """Layers that run in any order; parameters of its own, one without elements, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.randn(WIDTH) * 0.3)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([
            first, second, Block(), Tied(first), Attention(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Block(),
            nn.Linear(WIDTH, WIDTH),
        ])  # fmt: skip
        self.never = nn.Linear(3, 3)

    def forward(
        self,
        x: Tensor,
        order: Sequence[int],
        *,
        recompute: Sequence[int] = (),
        penalised: int | None = None,
        root_last: bool = False,
        interrupted_at: int | None = None,
    ) -> Tensor:
        """[n, 7] to [n, 7] through the layers in ``order``.

        ``recompute``: for each of them 0 (not), 1 or 2 (by torch's checkpoint without and with reentry); ``penalised``:
        the layer whose squared parameters are added; ``interrupted_at``: before which of them an exception is raised.
        """
        if not root_last:
            x = x * self.root
        for place, number in enumerate(order):
            if interrupted_at == place:
                raise Interrupted
            x = torch.tanh(self._run(self.layers[number], x, recompute[place] if recompute else 0)) + x
        if interrupted_at == len(order):
            raise Interrupted
        x = x * self.scalar + self.empty.sum()
        if root_last:
            x = x * self.root
        if penalised is not None:
            x = x + sum(p.square().mean() for p in self.layers[penalised].parameters())
        return x

    @staticmethod
    def _run(layer: nn.Module, x: Tensor, recompute: int) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=recompute == 2) if recompute else layer(x)
        return out


def net_of(seed: int) -> Net:
    """The net in float64, with values drawn from ``seed``."""
    torch.manual_seed(seed)
    return Net().double()


def fails(x: Tensor) -> Tensor:
    """Its input; the backward pass raises."""
    out: Tensor = _Fails.apply(x)  # type: ignore[no-untyped-call]
    return out


def inputs(seed: int, micro: int, rank: int) -> Tensor:
    """What one rank sees in a program's ``micro``-th forward pass: [4, 7], different everywhere."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * micro + rank)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def matrix_of(layer: nn.Module) -> nn.Parameter:
    """A layer's first weight: a matrix where it has one."""
    return next(p for p in layer.parameters() if p.dim() == 2 or isinstance(layer, nn.LayerNorm))
