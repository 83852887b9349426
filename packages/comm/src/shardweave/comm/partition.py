"""How a dimension is cut when it does not divide evenly: one rule for all packages.

``torch.chunk`` gives 6 rows on 4 ranks as 2, 2, 2, 0 and leaves a rank idle; a padded vocabulary puts rows
into the softmax that no token has. Balanced parts need neither: sizes differ by one at most.
"""

from __future__ import annotations

from itertools import accumulate

__all__ = ["split_range", "split_sizes"]


def split_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``parts`` contiguous parts of ``n`` things: the first ``n % parts`` are one larger.

    >>> split_sizes(11, 4)
    (3, 3, 3, 2)
    >>> split_sizes(2, 4)
    (1, 1, 0, 0)
    """
    if parts < 1 or n < 0:
        raise ValueError(f"cannot split {n} into {parts} parts")
    small, larger = divmod(n, parts)
    return tuple(small + (index < larger) for index in range(parts))


def split_range(n: int, parts: int, index: int) -> range:
    """The part number ``index`` of :func:`split_sizes` as a range of positions.

    >>> split_range(11, 4, 1)
    range(3, 6)
    """
    if not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} does not exist")
    ends = list(accumulate(split_sizes(n, parts), initial=0))
    return range(ends[index], ends[index + 1])
