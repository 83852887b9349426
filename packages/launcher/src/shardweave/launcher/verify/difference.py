"""One comparison's outcome: how far apart, where, and whether that is more than rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardweave.launcher.verify.places import Kind, phrase

__all__ = ["Difference", "largest_difference"]


@dataclass(frozen=True)
class Difference:
    """The largest difference of one tensor, or number, on one rank; 0 where all is equal."""

    kind: Kind
    step: int
    """From 1; 0: before the first step."""
    name: str
    """The parameter's canonical name or the place of hidden states; empty for loss and norm."""
    rank: int
    """The world's."""
    relative: float
    """To `scale`; infinite where one of the two is not finite or there is nothing to compare with."""
    tolerance: float
    """How much of that is rounding."""
    scale: float = 0.0
    """What the difference is relative to at this element; see `comparison` for each kind's."""
    ours: float = math.nan
    """The layout's value at the element that is farthest off."""
    reference: float = math.nan
    """One process' value there."""
    index: tuple[int, ...] = ()
    """That element in the full tensor; of hidden states (sample, position, feature)."""
    remark: str = ""
    """What the difference looks like, if anything."""

    @property
    def parts(self) -> bool:
        """Whether this is more than rounding."""
        return not self.relative <= self.tolerance

    def __str__(self) -> str:
        """The thing, the step and the numbers."""
        when = f"at step {self.step}" if self.step else "before the first step"
        text = f"{phrase(self.kind, self.name)} {when}: {self.ours:.9g} for {self.reference:.9g}"
        where = f" at {list(self.index)}" if self.index else ""
        return f"{text}{where}, {self.relative:.1e} apart where {self.tolerance:.0e} is rounding"

    def plain(self) -> dict[str, Any]:
        """For JSON among ranks."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Difference:
        """The value that `plain` came from."""
        return cls(**{**plain, "index": tuple(plain["index"])})


def largest_difference(ours: Tensor, reference: Tensor, scale: Tensor) -> tuple[float, int]:
    """The largest of ``|ours - reference| / scale`` and its place in the flattened tensors.

    ``scale``: one for all or one for each element. Equal elements are 0 apart whatever the scale, also when both are
    infinite or not a number; one that is so alone is infinitely far away.
    """
    if ours.numel() == 0:
        return 0.0, 0
    wide, right = ours.double(), reference.double()
    apart = (wide - right).abs() / scale.double()
    apart = torch.where(torch.isnan(apart), math.inf, apart)
    same = (wide == right) | (torch.isnan(wide) & torch.isnan(right))
    apart = torch.where(same, 0.0, apart).flatten()
    place = int(apart.argmax())
    return float(apart[place]), place
