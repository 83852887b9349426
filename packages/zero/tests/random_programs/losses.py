"""What a forward pass does, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from .net import LAYERS, WIDTH, Net, matrix_of

__all__ = ["Loss", "loss_of"]


@dataclass(frozen=True)
class Loss:
    """A mean of squares over the net's outputs, and what is added to it."""

    order: tuple[int, ...]
    """Layers, as they run."""
    recompute: tuple[int, ...]
    """See :meth:`.net.Net.forward`; empty: nothing is."""
    penalised: int | None
    root_last: bool
    added: str
    """One of ``ADDED``."""
    layers: tuple[int, int, int]
    """Those whose parameters it reads."""

    @classmethod
    def draw(cls, random: Random) -> Loss:
        """Half of them run all layers in order, as steps usually do."""
        order = tuple(random.randrange(LAYERS) for _ in range(random.randint(1, 7)))
        if random.random() < 0.5:
            order = tuple(range(LAYERS))
        kind = random.choice(["plain"] * 5 + ["recompute"] * 2 + ["penalty", *ADDED])
        return cls(
            order=order,
            recompute=tuple(random.choice([0, 1, 2]) for _ in order) if kind == "recompute" else (),
            penalised=random.randrange(1, LAYERS) if kind == "penalty" else None,
            root_last=random.random() < 0.2,
            added=kind if kind in ADDED else "",
            layers=(random.randrange(LAYERS), random.randrange(LAYERS), random.randrange(LAYERS)),
        )

    def __str__(self) -> str:
        parts = [f"layers {' '.join(map(str, self.order))}"]
        if self.recompute:
            parts.append(f"recompute {' '.join(map(str, self.recompute))}")
        if self.penalised is not None:
            parts.append(f"penalty on {self.penalised}")
        if self.root_last:
            parts.append("root last")
        if self.added:
            parts.append(f"{self.added} {self.layers}")
        return ", ".join(parts)


def loss_of(net: Net, loss: Loss, x: Tensor) -> Tensor:
    """The value, a scalar with its graph."""
    if loss.recompute:
        x = x.clone().requires_grad_()  # with reentry, torch asks for it
    out: Tensor = net(
        x, loss.order, recompute=loss.recompute, penalised=loss.penalised, root_last=loss.root_last
    )
    if loss.added == "both ways":
        out = out + net(x, loss.order[::-1])
    value = out.square().mean()
    return value + ADDED[loss.added](net, loss) if loss.added else value


def _starts(net: Net, loss: Loss, elements: int) -> list[Tensor]:
    """The first elements of the three weights that the loss reads: views."""
    return [matrix_of(net.layers[number]).reshape(-1)[:elements] for number in loss.layers]


def _nothing(net: Net, loss: Loss) -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _joined(net: Net, loss: Loss) -> Tensor:
    """Parameters of several units in one list, the argument of a function."""
    return torch.cat([matrix_of(net.layers[number]).reshape(-1) for number in loss.layers]).square().mean()


def _views(net: Net, loss: Loss) -> Tensor:
    """Views that are made long before they are read."""
    first, second, third = _starts(net, loss, 5)
    return (first * second * third).sum() + torch.stack([first, third]).sum()


def _written(net: Net, loss: Loss) -> Tensor:
    """A product of parameters that is written into a given tensor, as ``out=``."""
    first, second, _ = _starts(net, loss, WIDTH)
    with torch.no_grad():
        out = torch.empty(WIDTH, dtype=torch.float64)
        torch.mul(first, net.root, out=out)
    return (out * second).sum()


def _by_name(net: Net, loss: Loss) -> Tensor:
    """Parameters of three units as keyword arguments, and of two as arguments without number."""
    first, second, _ = _starts(net, loss, WIDTH)
    weight, bias = matrix_of(net.layers[1]), net.layers[5].get_parameter("bias")
    blocks: Tensor = torch.block_diag(first[:3], second[:3])
    return F.linear(input=first, weight=weight, bias=bias).square().sum() + blocks.sum()


def _detached(net: Net, loss: Loss) -> Tensor:
    """Values without gradients: ``.data`` and ``detach()``."""
    first, second = (matrix_of(net.layers[number]) for number in loss.layers[:2])
    return (first.data.reshape(-1)[:4] * second.detach().reshape(-1)[:4]).sum() * net.scalar


ADDED: Mapping[str, Callable[[Net, Loss], Tensor]] = {
    "both ways": _nothing,  # the layers run a second time, backwards
    "joined": _joined,
    "views": _views,
    "written": _written,
    "by name": _by_name,
    "detached": _detached,
}
"""What may be added to a loss, beside the outputs."""
