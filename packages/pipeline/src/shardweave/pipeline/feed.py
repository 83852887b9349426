"""What the caller hands to a step: inputs for the first stage, targets for the last, arguments for all.

Every rank calls ``step``; each checks what concerns its own stages. A wrong number is found before the
first message, because a rank that raised after it would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .values import Value, names_of, tensors_of

__all__ = ["Feed"]


@dataclass(frozen=True)
class Feed:
    """One entry per micro-batch in each sequence. ``None`` where this rank does not need them."""

    inputs: Sequence[Value] | None = None
    targets: Sequence[Any] | None = None
    arguments: Sequence[Mapping[str, Any]] | None = None
    scale: Tensor | float = field(default=1.0)
    """The loss of each micro-batch is multiplied by it before the backward."""
    seed: int | None = None
    """What the modules' random numbers come from, with stage and micro-batch; ``None``: torch's default generator."""

    def check(self, micro_batches: int, *, first: bool, needs_targets: bool, takes_targets: bool) -> None:
        """Raises ValueError unless what this rank was given makes ``micro_batches`` micro-batches.

        ``first``: this rank holds the first stage and so needs inputs. ``needs_targets``: it holds the last
        one, and there is a loss that takes targets. ``takes_targets``: there is such a loss.
        """
        if self.targets is not None and not takes_targets:
            raise ValueError("targets have no effect because there is no loss function; give Pipeline one")
        needed = {"inputs": first, "targets": needs_targets, "arguments": False}
        for name, is_needed in needed.items():
            given: Sequence[Any] | None = getattr(self, name)
            if given is None:
                if is_needed:
                    holder = "first" if name == "inputs" else "last"
                    raise ValueError(
                        f"no {name}: the rank with the {holder} stage needs one for each of "
                        f"{micro_batches} micro-batches"
                    )
            elif isinstance(given, Tensor) or len(given) != micro_batches:
                what = "a tensor" if isinstance(given, Tensor) else f"{len(given)}"
                raise ValueError(
                    f"{what} given as {name} for {micro_batches} micro-batches; pass a list with one entry per "
                    f"micro-batch (torch.tensor_split({name}, {micro_batches}) makes one), or build the "
                    "schedule for another number"
                )
        if not isinstance(self.scale, (int, float, Tensor)) or (
            isinstance(self.scale, Tensor) and self.scale.numel() != 1
        ):
            raise ValueError(f"scale is {self.scale!r}; it has to be a number, or a tensor of one element")
        for micro_batch, keywords in enumerate(self.arguments or ()):
            if not isinstance(keywords, Mapping):
                raise ValueError(
                    f"arguments {micro_batch} is a {type(keywords).__name__}; pass keyword arguments by name, as a dict"
                )
        if first:
            for micro_batch, value in enumerate(self.inputs or ()):
                tensors_of(value, f"input {micro_batch}")

    def input(self, micro_batch: int) -> tuple[tuple[Tensor, ...], tuple[str, ...] | None]:
        """What the first stage is called with: tensors, and their names if they came as a dict."""
        value = (self.inputs or ())[micro_batch]
        return tensors_of(value, f"input {micro_batch}"), names_of(value)

    def target(self, micro_batch: int) -> Any:
        """What the loss compares with."""
        return None if self.targets is None else self.targets[micro_batch]

    def keywords(self, micro_batch: int) -> Mapping[str, Any]:
        """Keyword arguments of every stage's call."""
        return {} if self.arguments is None else self.arguments[micro_batch]
