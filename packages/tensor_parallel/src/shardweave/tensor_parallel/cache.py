"""Keys and values of the tokens that were seen, so that the next token costs one token and not the whole text.

A token's key and value do not depend on what comes after it. Whoever continues a text keeps them and gives a layer only
what is new::

    given to the layer     The cat sat      on      the
    keys that it sees      0 1 2            0..3    0..4
    length before, after   0, 3             3, 4    4, 5

A rank keeps the heads that it computes. Keys are kept as they are compared: normed, and rotated at their own positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .alibi import later_keys

__all__ = ["LayerCache", "cached_attention"]


class LayerCache:
    """What one attention layer keeps of the tokens of some rows, on this rank.

    The memory is taken at once and lies where it is: tokens are written behind those that are there. ``key`` and
    ``value`` are ``[batch, kv_heads, capacity, head_dim]``, of which the first ``length`` tokens count and nobody reads
    the others.

    Args:
        batch: rows.
        kv_heads: key/value heads of this rank; copies of one that other ranks have, too, count.
        capacity: tokens of a row, at most.
        head_dim: features of a head.
        device: where; ``None``: torch's default device.
        dtype: of what the layer computes; ``None``: torch's default.

    Raises:
        ValueError: for a size below 1.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (
            ("batch", batch), ("kv_heads", kv_heads), ("capacity", capacity), ("head_dim", head_dim),
        ):  # fmt: skip
            if size < 1:
                raise ValueError(f"{name}: a cache of {size} holds nothing; use 1 or more")
        shape = batch, kv_heads, capacity, head_dim
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.key = torch.empty(shape, device=device, dtype=dtype)
            self.value = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def batch(self) -> int:
        """Rows."""
        return self.key.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens of a row, at most."""
        return self.key.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together, whatever was written of them."""
        return self.key.nbytes + self.value.nbytes

    def check(self, batch: int, new: int) -> None:
        """Refuses ``new`` tokens in ``batch`` rows that do not fit behind those that are there, with a ValueError."""
        if new < 1:
            raise ValueError("cache: no token comes; give the layer at least one behind those in the cache")
        if batch != self.batch:
            raise ValueError(
                f"cache: made for {self.batch} rows, and the input has {batch}; give it the rows that it was made "
                f"for, or make one with batch={batch}"
            )
        if self.length + new > self.capacity:
            raise ValueError(
                f"cache: {self.length} tokens are in it and {new} come, and it has room for {self.capacity}; make one "
                f"of length {self.length + new} or more, or start a new text"
            )

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes ``new`` tokens' ``[batch, kv_heads, new, head_dim]`` behind the others; returns the keys and values of
        all, ``[batch, kv_heads, length, head_dim]``, views.

        Raises:
            ValueError: for another batch or more tokens than there is room for; for keys of another layer's shape,
                or of another dtype, which would be rounded; where autograd would have to remember what was here.
        """
        batch, kv_heads, new, head_dim = key.shape
        self.check(batch, new)
        if (kv_heads, head_dim) != (self.key.shape[1], self.key.shape[3]):
            raise ValueError(
                f"cache: made for {self.key.shape[1]} key/value heads of {self.key.shape[3]} features, and this layer "
                f"has {kv_heads} of {head_dim}; give each layer its own, from new_cache()"
            )
        if key.dtype != self.key.dtype:
            raise ValueError(
                f"cache: holds {self.key.dtype} and the layer computes {key.dtype}; make it with dtype={key.dtype}"
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError(
                "cache: nothing flows back through the tokens in it; call the layer inside of torch.no_grad()"
            )
        self.key.narrow(2, self.length, new).copy_(key)
        self.value.narrow(2, self.length, new).copy_(value)
        self.length += new
        return self.key.narrow(2, 0, self.length), self.value.narrow(2, 0, self.length)

    def __repr__(self) -> str:
        return f"LayerCache({self.length} of {self.capacity} tokens, {self.batch} rows, {self.key.dtype})"


def cached_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """The last tokens' attention to themselves and all before: ``[b, n, new, d]``.

    ``query`` ``[b, n, new, d]`` of the last ``new`` of ``length`` tokens, ``key`` and ``value`` ``[b, n_kv, length,
    d]``. ``mask``: ``[1, n, new, length]``, added to the scores, minus infinity where a key comes later; ``None``:
    nothing but that.

    Query heads that share a key stand below one another as if they were tokens, so that no key is copied for each.
    """
    batch, heads, new, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    if mask is not None:
        mask = mask.reshape(1, kv_heads, group * new, length)
    elif new > 1:
        # torch's causal mask begins at the first key, which is right only where queries and keys are as many.
        mask = ~later_keys(new, query.device, length - new).repeat(group, 1)
    rows = query.reshape(batch, kv_heads, group * new, width)
    return F.scaled_dot_product_attention(rows, key, value, attn_mask=mask).reshape(batch, heads, new, width)
