"""Keys and values of the tokens before, of all layers that a rank has: what makes the next token cheap.

One object serves all stages of a rank, layer by layer under its global number; a stage takes what is its own::

    rank 0    stage 0: embedding, layers 0 1      stage 2: layers 4 5      Cache(layers 0 1 4 5)
    rank 1    stage 1: layers 2 3                 stage 3: 6 7, head       Cache(layers 2 3 6 7)

Each layer counts its own tokens, since the stages of a rank are not all at the same place at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from shardweave.comm import split_sizes
from shardweave.tensor_parallel import LayerCache

from .block import Block
from .config import TransformerConfig
from .parts import Part

__all__ = ["Cache", "cache_bytes", "make_cache"]


@dataclass(eq=False)
class Cache:
    """What a rank's layers keep of the tokens before, for some rows of one text each; made by :func:`make_cache`.

    Handed to :meth:`.Transformer.forward` together with the tokens that come next. There is no way back: for another
    text make another one.
    """

    batch: int
    """Rows."""

    capacity: int
    """Tokens of a row, at most."""

    layers: dict[int, LayerCache] = field(default_factory=dict)
    """By global number, those of this rank."""

    embedded: int = 0
    """Tokens that went through the embedding, where it is on this rank: where the next one's position begins."""

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values: :func:`cache_bytes`."""
        return sum(layer.nbytes for layer in self.layers.values())

    def check(self, part: Part, batch: int, new: int) -> None:
        """Refuses ``new`` tokens in ``batch`` rows that do not fit, or a part with other layers, with a ValueError."""
        missing = [layer for layer in part.layers if layer not in self.layers]
        if missing:
            raise ValueError(
                f"cache: has nothing for layer {missing[0]}; make it with make_cache() of all modules of this rank"
            )
        for layer in part.layers:
            self.layers[layer].check(batch, new)
        if part.embedding and (batch != self.batch or self.embedded + new > self.capacity):
            raise ValueError(
                f"cache: made for {self.batch} rows of {self.capacity} tokens and has {self.embedded}; the input has "
                f"{batch} rows and {new} tokens more; make one with batch={batch}, length={self.embedded + new} or more"
            )


def make_cache(
    modules: Iterable[nn.Module], batch: int, length: int, *, dtype: torch.dtype | None = None
) -> Cache:
    """An empty cache for all layers of a rank's ``modules``: the parts of one model that it has, or the model.

    For ``batch`` rows of at most ``length`` tokens, where the parameters are. ``dtype``: of what the layers compute;
    default: the parameters'.

    Raises:
        ValueError: when the modules hold a layer twice, or a size is below 1.
    """
    if batch < 1 or length < 1:
        raise ValueError(
            f"make_cache: {batch} rows of {length} tokens are nothing to keep; use 1 or more of both"
        )
    made = Cache(batch, length)
    for block in (block for module in modules for block in module.modules() if isinstance(block, Block)):
        if block.layer in made.layers:
            raise ValueError(
                f"make_cache: layer {block.layer} is there twice; give the parts of one model, each once"
            )
        made.layers[block.layer] = block.attention.new_cache(batch, length, dtype=dtype)
    return made


def cache_bytes(
    config: TransformerConfig,
    tensor: int,
    batch: int,
    length: int,
    *,
    part: Part | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes of a rank's cache for ``batch`` rows of ``length`` tokens, the same on each of ``tensor`` ranks::

        2 (key, value) * layers * batch * length * key/value heads of a rank * features of a head * bytes of a number

    Where there are more ranks than key/value heads, each has one of them. ``part``: what is held of the model; default:
    all of it.
    """
    held = Part.whole(config) if part is None else part
    heads = max(split_sizes(config.num_kv_heads, tensor)[0], 1)
    return 2 * len(held.layers) * batch * length * heads * config.head_size * dtype.itemsize
