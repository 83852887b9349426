"""What a rank asks for when it communicates: the value that ranks compare and that reports print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..axis import Axis
from ..text import dtype_name, ranks_text

__all__ = ["Call"]


class Call(NamedTuple):
    """One collective, send or receive, as its caller asked for it. Made for every call, so it is cheap to make."""

    kind: str
    """``all_reduce``, ``send``, ..."""
    axis: Axis
    dtype: torch.dtype | None = None
    """``None`` for what is no communication of a tensor."""
    shape: Sequence[int] = ()
    """Of what all members have to see alike: the gathered result, the whole input of a reduce-scatter."""
    options: Mapping[str, Any] = {}
    """What else has to be alike, by the name that a person reads: ``{"operation": "sum"}``."""
    peer: int | None = None
    """Global rank of the other end of a send or receive; ``None`` for a collective."""

    @property
    def counter(self) -> tuple[str, str, int]:
        """What it is counted under: the collectives of an axis together, messages by direction and peer."""
        if self.peer is not None:
            return (self.kind, self.axis.name, self.peer)
        return ("collective" if self.dtype is not None else self.kind, self.axis.members, 0)

    @property
    def fields(self) -> dict[str, str]:
        """What all members, or both ends of a message, have to say alike, by name, as text."""
        dtype = "" if self.dtype is None else dtype_name(self.dtype)
        if self.peer is not None:  # a buffer may have another shape than what is sent into it
            return {"axis": self.axis.name, "dtype": dtype, "elements": str(prod(self.shape))}
        tensor = {} if self.dtype is None else {"dtype": dtype, "shape": str(tuple(self.shape))}
        return {"collective": self.kind, "axis": self.axis.name, **tensor, **self._options()}

    @property
    def place(self) -> str:
        """``tp (ranks 0, 1)``, or ``pp to rank 3``."""
        if self.peer is not None:
            return f"{self.axis.name} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.axis.name} ({ranks_text(self.axis.ranks)})"

    @property
    def details(self) -> str:
        """``float32 (4, 5), operation sum``; empty for what is no communication of a tensor."""
        if self.dtype is None:
            return ""
        words = [f"{dtype_name(self.dtype)} {tuple(self.shape)}"]
        words += [f"{name} {value}" for name, value in self._options().items()]
        return ", ".join(words)

    def _options(self) -> dict[str, str]:
        """As a person reads them: ``waited for at once``, ``parts 2, 3``."""
        return {
            name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in self.options.items()
        }
