"""Which slice of a feature dimension a rank holds: plain arithmetic, told apart from the layers that use it.

Two rules cover every layer. Plain features are split in balanced parts, uneven where they do not divide. The
features of attention heads are split between heads only, and where there are fewer heads than ranks (grouped-query
attention), several neighbouring ranks hold the same head::

    8 features, 3 ranks          2 heads of 4 features, 4 ranks
    [0 1 2] [3 4 5] [6 7]        [head 0] [head 0] [head 1] [head 1]     copies = 2
                                  copy 0   copy 1   copy 0   copy 1
"""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.comm import Axis, Sharding, Split, split_range, split_sizes

from .asking import check_axes

__all__ = ["FeatureSplit", "split_features", "split_heads"]


@dataclass(frozen=True)
class FeatureSplit:
    """The slice ``start : start + length`` of ``features`` features that this rank holds."""

    features: int
    """Size of the whole dimension."""
    start: int
    """First feature of this rank's slice."""
    length: int
    """Features in this rank's slice; 0 on a rank that is left over."""
    copy: int = 0
    """How many earlier ranks hold the very same slice."""
    copies: int = 1
    """How many neighbouring ranks hold each slice."""

    @property
    def index(self) -> slice:
        """The slice, to index the full tensor with."""
        return slice(self.start, self.start + self.length)

    def sharding(
        self, axis: Axis, shape: tuple[int, ...], dim: int, *, partial: tuple[Axis, ...] = ()
    ) -> Sharding:
        """The record of a parameter of full ``shape`` whose ``dim`` is split this way over ``axis``.

        Ranks that share a slice see different query heads, so the gradient of each is a part of the sum.
        """
        if axis.size == 1:
            return Sharding("", shape)
        if self.copies > 1:
            partial = (*partial, axis.blocks(self.copies))
        return Sharding("", shape, (Split(axis, dim, self.start, self.copy),), partial=partial)


def split_features(features: int, axis: Axis) -> FeatureSplit:
    """Balanced contiguous parts: the first ``features % axis.size`` ranks hold one feature more."""
    check_axes(axis=axis)
    own = split_range(features, axis.size, axis.rank)
    return FeatureSplit(features, own.start, len(own))


def split_heads(heads: int, head_dim: int, axis: Axis) -> FeatureSplit:
    """Whole heads of ``head_dim`` features: ``heads / ranks`` to a rank, or a head to ``ranks / heads`` ranks.

    Raises:
        ValueError: when neither number divides the other.
    """
    check_axes(axis=axis)
    features = heads * head_dim
    if heads % axis.size == 0:
        return split_features(features, axis)
    if axis.size % heads == 0:
        copies = axis.size // heads
        head, copy = divmod(axis.rank, copies)
        return FeatureSplit(features, head * head_dim, head_dim, copy, copies)
    raise ValueError(
        f"{heads} heads cannot be shared by the {axis.size} ranks of axis {axis.name!r}: the number of heads "
        f"must divide the number of ranks or be a multiple of it; use {_fitting(heads, axis.size)} ranks"
    )


def feature_split(features: int | FeatureSplit, axis: Axis, name: str) -> FeatureSplit:
    """Balanced parts of a number, or the split that was given; ``name`` is what the caller calls it."""
    check_axes(axis=axis)
    if isinstance(features, FeatureSplit):
        return features
    if not isinstance(features, int) or isinstance(features, bool) or features < 0:
        raise ValueError(f"{name}={features!r}: give the whole number of features, or a FeatureSplit")
    return split_features(features, axis)


def part_sizes(features: int, axis: Axis) -> tuple[int, ...] | None:
    """Lengths of all ranks' parts, or ``None`` where they are equal and nothing has to be said."""
    sizes = split_sizes(features, axis.size)
    return None if len(set(sizes)) == 1 else sizes


def _fitting(heads: int, ranks: int) -> str:
    fitting = [
        str(size) for size in range(1, 2 * max(heads, ranks) + 1) if heads % size == 0 or size % heads == 0
    ]
    return ", ".join(fitting[:-1]) + " or " + fitting[-1] if len(fitting) > 1 else fitting[0]
