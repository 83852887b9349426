"""What is trained: a GPT of plain torch layers, so that every way of training gets the same module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "LARGE", "SMALL", "Block", "Shape", "batch"]


@dataclass(frozen=True)
class Shape:
    """Of a GPT with untied embeddings and learned positions."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int


SMALL = Shape(layers=4, hidden=256, heads=4, sequence=128, vocabulary=4096)
"""5.3 million parameters: steps are short, and everything around them shows."""
LARGE = Shape(layers=8, hidden=1024, heads=8, sequence=128, vocabulary=4096)
"""109 million parameters, 417 MiB in fp32: what each way keeps shows."""


class GPT(nn.Module):
    """The loss of tokens: both arguments ``[sequences, sequence]``. Equal weights wherever it is built."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy, in float32: 0-d."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


def batch(shape: Shape, sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, both ``[sequences, sequence]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocabulary, (sequences, shape.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
