"""What a rank executes: the actions of a schedule with the sends and receives between them.

A schedule says in which order a rank works; a program says in addition when it sends and receives. Programs are
values like schedules, and have a text form of one line, which is read back: people may write their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .actions import Action

__all__ = ["Exchange", "Program", "Run", "Settle", "Step", "Transfer", "parse_program"]

_TRANSFER = re.compile(r"(\d+[FBIW]\d+)([<>])(\d+)")
_STEP = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message; in text ``2F0>3`` (sent to rank 3) or ``2F0<1`` (received from rank 1)."""

    direction: Literal["send", "receive"]
    action: Action
    """What produced the value: ``F`` an activation for the stage behind, ``B`` or ``I`` a gradient for the one
    before. Kind, micro-batch and stage identify the message."""
    peer: int
    """The other end's position on the axis."""

    @classmethod
    def parse(cls, text: str) -> Transfer:
        """The transfer that prints as ``text``; the inverse of ``str``."""
        match = _TRANSFER.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no message; write the action that produces it and the other end's rank: '2F0>3' to "
                "send it to rank 3, '2F0<1' to receive it from rank 1"
            )
        action, direction, peer = match.groups()
        return cls("send" if direction == ">" else "receive", Action.parse(action), int(peer))

    @property
    def is_send(self) -> bool:
        """Whether this rank is the source."""
        return self.direction == "send"

    def __str__(self) -> str:
        return f"{self.action}{'>' if self.is_send else '<'}{self.peer}"


@dataclass(frozen=True, slots=True)
class Run:
    """Execute an action, once what it needs has arrived."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Post these sends and receives together, without waiting for them; in text ``(2F0>3 4B0<3)``."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.transfers))})"


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait for the sends of these actions' values and let go of the buffers; in text ``~2F0``."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return " ".join(f"~{action}" for action in self.actions)


Step: TypeAlias = Run | Exchange | Settle
Program: TypeAlias = tuple[Step, ...]


def parse_program(text: str) -> Program:
    """The program that prints as ``text``: one rank's line, as in ``0F0 (0F0>1) 0F1 (0F1>1 1B0<1) 0B0 ~0F0``.

    Raises:
        ValueError: a word that is no action, message or settlement, or a bracket without its partner.
    """
    if _STEP.sub("", text).strip():
        raise ValueError(f"{text!r}: messages stand in brackets that open and close, as in '(0F1>1 1B0<1)'")
    steps: list[Step] = []
    for match in _STEP.finditer(text):
        messages, word = match.groups()
        if word is None:
            steps.append(Exchange(tuple(map(Transfer.parse, messages.split()))))
        elif word.startswith("~"):
            last = steps[-1] if steps else None
            before = last.actions if isinstance(last, Settle) else ()
            steps[len(steps) - bool(before) :] = [Settle((*before, Action.parse(word[1:])))]
        else:
            steps.append(Run(Action.parse(word)))
    return tuple(steps)
