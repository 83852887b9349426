"""What actions, messages and kept activations cost: given, counted from the pieces of a model, or measured.

All times of one object are in one unit, whichever it is; figures of a simulation come out in the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from .actions import Action
from .timing import Timing

__all__ = ["Costs", "PieceCosts"]

PerStage: TypeAlias = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class PieceCosts:
    """What one piece of a model (an embedding, a layer, a head) costs for one micro-batch."""

    forward: float
    """Time of its forward."""
    input: float
    """Time of the gradient of its input."""
    weight: float = 0.0
    """Time of the gradients of its weights."""
    memory: float = 0.0
    """Bytes kept from its forward to its backward."""
    weight_memory: float | None = None
    """Bytes of them kept until the gradients of its weights are done; ``None``: all."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times in any one unit. A number holds for every stage, a sequence has one entry per stage."""

    forward: PerStage = 1.0
    """Time of ``F``."""
    backward: PerStage = 2.0
    """Time of ``B``; twice a forward where both are matrix products."""
    weight: PerStage | None = None
    """Time of ``W``; the rest of ``backward`` is that of ``I``. ``None``: half of it."""
    message: float | Callable[[int, int], float] = 0.0
    """Time from the end of an action until a dependent one on another rank may start: one number, or a function
    of the ranks it goes from and to. A message keeps neither rank from working."""
    memory: PerStage = 0.0
    """Bytes that a micro-batch keeps on a stage, from the start of ``F`` to the end of ``B`` or of ``I``."""
    weight_memory: PerStage | None = None
    """Bytes of ``memory`` that are kept until the end of ``W``. ``None``: all of them."""

    @classmethod
    def counted(
        cls,
        pieces: Sequence[PieceCosts],
        ranges: Sequence[range],
        *,
        message: float | Callable[[int, int], float] = 0.0,
    ) -> Costs:
        """The costs of stages made of ``pieces``: stage s of those in ``ranges[s]``, as ``partition`` gives them.

        Times may be counts of operations: only their proportions matter to bubbles.

        Raises:
            ValueError: a range that reaches beyond the pieces.
        """
        for stage, its in enumerate(ranges):
            if its and not 0 <= min(its[0], its[-1]) <= max(its[0], its[-1]) < len(pieces):
                raise ValueError(
                    f"stage {stage} is made of the pieces {its}, and there are {len(pieces)}: 0 to {len(pieces) - 1}"
                )
        stages = [[pieces[index] for index in its] for its in ranges]
        return cls(
            forward=[sum(piece.forward for piece in stage) for stage in stages],
            backward=[sum(piece.input + piece.weight for piece in stage) for stage in stages],
            weight=[sum(piece.weight for piece in stage) for stage in stages],
            message=message,
            memory=[sum(piece.memory for piece in stage) for stage in stages],
            weight_memory=[
                sum(piece.memory if piece.weight_memory is None else piece.weight_memory for piece in stage)
                for stage in stages
            ],
        )

    @classmethod
    def measured(
        cls,
        timings: Iterable[Timing],
        num_stages: int,
        *,
        message: float | Callable[[int, int], float] = 0.0,
    ) -> Costs:
        """The costs of a step that ran: of every stage and kind, the median time of ``timings``.

        ``timings`` are those of all ranks, each in any clock: only what lies between start and end counts. Where
        backwards ran whole, halves are taken to be equal; where they ran in two parts, a whole one is their sum.

        Raises:
            ValueError: no forward or no backward of some stage is among them.
        """
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for timing in timings:
            times[timing.action.kind, timing.action.stage].append(timing.end - timing.start)
        typical = {key: median(values) for key, values in times.items()}
        for stage in range(num_stages):
            if ("F", stage) not in typical or not {("B", stage), ("I", stage)} & typical.keys():
                raise ValueError(
                    f"stage {stage} of {num_stages} has no forward or no backward among the timings; pass those of "
                    "all ranks and of a whole step"
                )
        halves = [(typical.get(("I", stage)), typical.get(("W", stage), 0.0)) for stage in range(num_stages)]
        whole = [typical.get(("B", stage)) for stage in range(num_stages)]
        backward = [
            its if its is not None else (first or 0.0) + second
            for its, (first, second) in zip(whole, halves, strict=True)
        ]
        return cls(
            forward=[typical["F", stage] for stage in range(num_stages)],
            backward=backward,
            weight=[
                total / 2 if first is None else min(second, total)
                for total, (first, second) in zip(backward, halves, strict=True)
            ],
            message=message,
        )

    def of(self, action: Action) -> float:
        """How long ``action`` takes."""
        return self._of(action.kind, action.stage)

    def between(self, source: int, to: int) -> float:
        """How long a message takes from rank ``source`` to rank ``to``; none within a rank."""
        if source == to:
            return 0.0
        return self.message(source, to) if callable(self.message) else self.message

    def durations(self, num_stages: int) -> dict[str, list[float]]:
        """By kind of action: the time of each stage."""
        return {kind: [self._of(kind, stage) for stage in range(num_stages)] for kind in "FBIW"}

    def kept(self, stage: int) -> tuple[float, float]:
        """Bytes that a micro-batch keeps on ``stage``: before ``I``, and between ``I`` and ``W``."""
        memory = _at(self.memory, stage)
        return memory, memory if self.weight_memory is None else _at(self.weight_memory, stage)

    def check(self, num_stages: int, num_ranks: int) -> None:
        """Refuses what cannot be.

        Raises:
            ValueError: a negative time, a sequence that is not one entry per stage, or a part that is more than
                the whole: ``weight`` more than ``backward``, ``weight_memory`` more than ``memory``.
        """
        for name in ("forward", "backward", "weight", "memory", "weight_memory"):
            value = getattr(self, name)
            entries = value if isinstance(value, Sequence) else [] if value is None else [value]
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(
                    f"costs: {name} has {len(value)} entries for {num_stages} stages; give one per stage"
                )
            if any(not 0 <= entry < float("inf") for entry in entries):
                raise ValueError(f"costs: {name} is {value}; it is made of finite numbers from 0 up")
        for source in range(num_ranks):
            for to in range(num_ranks):
                if not 0 <= self.between(source, to) < float("inf"):
                    raise ValueError(
                        f"costs: message is {self.between(source, to)} from rank {source} to rank {to}; "
                        "it is a finite number from 0 up"
                    )
        for part, whole in (("weight", "backward"), ("weight_memory", "memory")):
            given = getattr(self, part)
            for stage in range(num_stages if given is not None else 0):
                if _at(given, stage) > _at(getattr(self, whole), stage):
                    raise ValueError(
                        f"costs: {part} of stage {stage} is {_at(given, stage)} and {whole} is "
                        f"{_at(getattr(self, whole), stage)}; the first is a part of the second"
                    )

    def _of(self, kind: str, stage: int) -> float:
        if kind == "F":
            return _at(self.forward, stage)
        backward = _at(self.backward, stage)
        weight = backward / 2 if self.weight is None else _at(self.weight, stage)
        return {"B": backward, "I": backward - weight, "W": weight}[kind]


def _at(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value
