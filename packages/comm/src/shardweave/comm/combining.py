"""Combining what several ranks sent: in one fixed order, whatever arrives first, so the same bits on every run.

Floats are added in float32 or wider and rounded once. A mean divides that sum before it is rounded: the sum of float16
gradients may overflow where their mean does not, and dividing first would lose the smallest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["combine", "combine_parts", "combine_two"]

_PIECE = 1 << 16
"""Elements that are converted at once to be added up."""

_INTO: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine(parts: Tensor, out: Tensor, op: str) -> None:
    """``parts[0] op parts[1] op ...`` into ``out``: sums and means in float32 or wider, rounded once."""
    if op == "max":
        torch.amax(parts, 0, out=out)
    elif op == "min":
        torch.amin(parts, 0, out=out)
    elif _converted(parts.dtype, out.dtype):
        _add_converted(parts.unbind(0), out, op)
    else:
        torch.sum(parts, 0, dtype=out.dtype, out=out)
        if op == "mean":
            out.div_(parts.shape[0])


def combine_two(mine: Tensor, theirs: Tensor, out: Tensor, op: str) -> None:
    """``mine op theirs`` into ``out``, which may be one of them; as :func:`combine`."""
    if op in ("sum", "mean") and _converted(mine.dtype, out.dtype):
        _add_converted((mine, theirs), out, op)
        return
    _INTO[op](mine, theirs, out=out)
    if op == "mean":
        out.div_(2)


def combine_parts(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """``parts[0] op parts[1] op ...`` into ``out``, which is none of them; as :func:`combine`, of parts that lie apart.

    In pieces that fit into a cache, so that ``out`` goes through memory once.
    """
    if op in ("sum", "mean") and _converted(parts[0].dtype, out.dtype):
        _add_converted(parts, out, op)
        return
    for first, second, *others, result in zip(
        *(t.view(-1).split(_PIECE) for t in (*parts, out)), strict=True
    ):
        _INTO[op](first, second, out=result)
        for other in others:
            _INTO[op](result, other, out=result)
        if op == "mean":
            result.div_(len(parts))


def _converted(given: torch.dtype, result: torch.dtype) -> bool:
    """Whether whoever adds up has to convert: to another format than one of the two."""
    return {given, result} != {_wide(given, result)}


def _wide(given: torch.dtype, result: torch.dtype) -> torch.dtype:
    """The format that sums are taken in: of floats the widest of the two and float32."""
    if not given.is_floating_point:
        return result
    return torch.promote_types(torch.promote_types(given, result), torch.float32)


def _add_converted(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """The sum or mean, taken in :func:`_wide` format and rounded once; ``out`` may be one of the ``parts``.

    In pieces that fit into a cache: twice as fast as converting everything at once, and that would take several times
    the memory of what was received.
    """
    wide = _wide(parts[0].dtype, out.dtype)
    for *pieces, result in zip(*(tensor.view(-1).split(_PIECE) for tensor in (*parts, out)), strict=True):
        total = pieces[0].to(wide, copy=True)
        for piece in pieces[1:]:
            total.add_(piece)
        result.copy_(total.div_(len(parts)) if op == "mean" else total)
