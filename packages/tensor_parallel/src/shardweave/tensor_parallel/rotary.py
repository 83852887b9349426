"""Rotary position embedding: queries and keys turned by an angle that grows with the position.

A head knows its positions from this alone, so it is the same on every tensor-parallel rank, and a rank that
holds a part of the sequence only has to be told which part (``positions``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .context import positions_of
from .rotary_scaling import RotaryScaling, rotary_frequencies

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Rotates pairs of features (Su et al., section 3.2.2, arXiv:2104.09864).

    Feature ``i`` is paired with feature ``i + d/2`` (as in GPT-NeoX and Llama) and the pair is turned by
    ``position * base^(-2i/d)``, where ``d`` is the number of rotated features. Angles are computed in
    float32, or in float64 for such inputs. It has no parameters and no buffers; one instance may serve all
    layers.

    Args:
        head_dim: features of a head.
        base: the angles' base.
        fraction: which part of the features, from the first on, is rotated; the others pass (GPT-NeoX: 0.25).
        scaling: slows rotation down, for longer sequences than trained on; yarn's factor of the scores, too, is in
            what comes out.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        self.features = int(head_dim * fraction)
        if self.features % 2 or not 0 < self.features <= head_dim:
            raise ValueError(
                f"rotary: {fraction} of a head of {head_dim} features is {self.features}, which must be "
                f"even and between 2 and {head_dim}"
            )
        self.head_dim, self.base, self.scaling = head_dim, base, scaling
        self._cache: dict[tuple[object, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, positions: Tensor | tuple[range, ...] | None = None) -> Tensor:
        """Rotates ``x`` ``[..., s, head_dim]``; ``positions`` ``[s]`` are ``0 .. s - 1`` when not given.

        Given as ranges, their angles are kept for the next layer, as those of ``0 .. s - 1`` are.
        """
        if isinstance(positions, Tensor):
            cosine, sine = self._angles(positions, x)
        else:
            cosine, sine = self._cached(x, (range(x.shape[-2]),) if positions is None else positions)
        turned, rest = x[..., : self.features], x[..., self.features :]
        first, second = turned.chunk(2, dim=-1)
        result = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return torch.cat((result, rest), dim=-1) if rest.shape[-1] else result

    def _cached(self, x: Tensor, ranges: tuple[range, ...]) -> tuple[Tensor, Tensor]:
        key = (ranges, x.device, x.dtype)
        if key not in self._cache:
            self._cache.clear()  # a run has one length; evaluation with another one must not collect them all
            with torch.inference_mode(
                False
            ):  # what evaluation leaves here, a training step saves for backward
                self._cache[key] = self._angles(positions_of(ranges, x.device), x)
        return self._cache[key]

    def _angles(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, ``[s, features / 2]`` each, in the dtype of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        frequencies, factor = rotary_frequencies(
            self.features, base=self.base, scaling=self.scaling, dtype=wide, device=x.device
        )
        angles = torch.outer(positions.to(device=x.device, dtype=wide), frequencies)
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)

    def extra_repr(self) -> str:
        scaled = "" if self.scaling is None else f", scaling={self.scaling.kind} {self.scaling.factor:g}"
        return f"head_dim={self.head_dim}, rotated={self.features}, base={self.base}{scaled}"
