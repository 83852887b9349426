"""What is split: an MLP and a GPT of plain torch layers. Sequence first, ``[s, b, h]``, as all ways take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "GPT",
    "MLP",
    "Block",
    "PlainAttention",
    "Shape",
    "activations",
    "plain_gpt",
    "plain_mlp",
    "tokens",
]


@dataclass(frozen=True)
class Shape:
    """Sizes of both."""

    hidden: int = 512
    inner: int = 2048
    heads: int = 8
    sequence: int = 256
    batch: int = 4
    layers: int = 2
    vocabulary: int = 1024

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` to the same."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, with a norm before each."""

    def __init__(self, attention: nn.Module, mlp: MLP, hidden: int) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` to the same."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """Embedding with learned positions, blocks, a last norm, and a head that is not tied."""

    def __init__(
        self, embedding: nn.Module, blocks: Sequence[Block], head: nn.Module, shape: Shape, own: slice
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleList(blocks), head
        self.position = nn.Parameter(torch.randn(shape.sequence, shape.hidden) * 0.02)
        self.norm = nn.LayerNorm(shape.hidden)
        self.own = own
        """The part of the sequence that is here between the split layers."""

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``[s, b]`` to logits ``[s, b, v]``, as the head gives them."""
        x: Tensor = self.embedding(ids)
        x = x + self.position[self.own].unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class PlainAttention(nn.Module):
    """Causal self-attention of ``[s, b, h]``, by as many heads as its layers give features for.

    ``parts``: of so many equal parts of the heads it has one.
    """

    def __init__(self, shape: Shape, parts: int = 1) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width = shape.hidden // parts
        self.query, self.key, self.value = (nn.Linear(shape.hidden, width) for _ in range(3))
        self.output = nn.Linear(width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` to the same."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.output(mixed.permute(2, 0, 1, 3).flatten(2))
        return y


def plain_mlp(shape: Shape, parts: int = 1) -> MLP:
    """Whole, with the same weights wherever it is built; or as large as one of ``parts``, with any weights."""
    torch.manual_seed(0)
    inner = shape.inner // parts
    return MLP(nn.Linear(shape.hidden, inner), nn.Linear(inner, shape.hidden))


def plain_gpt(shape: Shape, parts: int = 1) -> GPT:
    """As :func:`plain_mlp`."""
    torch.manual_seed(0)
    blocks = [
        Block(PlainAttention(shape, parts), plain_mlp(shape, parts), shape.hidden)
        for _ in range(shape.layers)
    ]
    embedding = nn.Embedding(shape.vocabulary // parts, shape.hidden)
    head = nn.Linear(shape.hidden, shape.vocabulary // parts, bias=False)
    return GPT(embedding, blocks, head, shape, slice(None))


def activations(shape: Shape, seed: int) -> Tensor:
    """``[s, b, h]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.sequence, shape.batch, shape.hidden, generator=generator)


def tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    """Ids and targets, both ``[s, b]``."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(shape.vocabulary, (shape.sequence + 1, shape.batch), generator=generator)
    return drawn[:-1].contiguous(), drawn[1:].contiguous()
