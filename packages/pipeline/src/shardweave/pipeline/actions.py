"""The smallest piece of a pipeline schedule, as a value with a readable text form.

A schedule is a list of these per rank. Because an action prints as ``2F0`` and is read back from it, a
schedule can stand in a docstring, a test or a file exactly as it runs.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, Self, cast, get_args

__all__ = ["Action", "Kind"]

Kind = Literal["F", "B", "I", "W"]
"""What is done with one micro-batch on one stage.

- ``F`` forward.
- ``B`` the whole backward: gradients of the stage's input and of its weights.
- ``I`` the gradient of the input only, which is all that the previous stage waits for.
- ``W`` the gradients of the weights, put off by ``I``.

A micro-batch takes either ``F B`` or ``F I W`` on a stage.
"""

_KINDS: tuple[str, ...] = get_args(Kind)
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class _Fields(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


class Action(_Fields):
    """One kind of work, on one stage, for one micro-batch; in text ``2F0``: stage 2, forward, micro-batch 0.

    A tuple, because a running pipeline looks values up by it several times for every message.
    """

    __slots__ = ()

    def __new__(cls, kind: Kind, stage: int, micro_batch: int) -> Self:
        if kind not in _KINDS or stage < 0 or micro_batch < 0:
            raise ValueError(
                f"no such action: kind {kind!r}, stage {stage}, micro-batch {micro_batch}; "
                f"the kind is one of {', '.join(_KINDS)} and the numbers count from 0"
            )
        return super().__new__(cls, kind, stage, micro_batch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as ``text``; the inverse of ``str``."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action; write stage, kind and micro-batch, as in '2F0'")
        stage, kind, micro_batch = match.groups()
        return cls(cast(Kind, kind), int(stage), int(micro_batch))

    @property
    def is_backward(self) -> bool:
        """Whether it takes the gradient of the stage's output: ``B`` or ``I``."""
        return self.kind in ("B", "I")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"
