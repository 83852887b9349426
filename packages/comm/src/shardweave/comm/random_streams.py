"""Named streams of torch's own random numbers, for code that draws from torch's default generators.

The dropout of a module that somebody else wrote takes the next numbers of the default generator. Where every rank
computes the same, all ranks have to draw the same; where each has its own heads, they have to draw apart. A second
generator that is advanced on its own would do that until a layer is recomputed: recomputation puts the default
generator back, and no other. So a stream has no state at all. It is forked off the default generator, by one number
that is drawn there, and whoever keeps and restores the default generator (torch's checkpoint of activations, a
checkpoint on disk) has kept every stream::

    default    a b c | n |               d e f       the same on all ranks of the axis
    split            n-> seed(n, rank) x y z         apart on each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .axis import Axis
from .random import named_seed

__all__ = ["RandomFork", "RandomStreams"]


@dataclass(frozen=True)
class RandomStreams:
    """Streams by name, each with the axes whose ranks draw different numbers in it.

    With ``RandomStreams({"replicated": (mesh.dp,), "split": (mesh.dp, mesh.tp)})``, ``seed(17, "replicated")``
    starts the default generators, apart on data-parallel replicas and alike on tensor ranks; within
    ``use("split")`` tensor ranks draw apart, too, and afterwards alike again.
    """

    apart: Mapping[str, Sequence[Axis]]
    """Ranks that differ in their position on one of these axes draw different numbers; all others the same."""

    def seed(self, seed: int, name: str) -> None:
        """Seeds torch's default generators (CPU and current accelerator) with (seed, name, this rank's positions).

        Raises:
            ValueError: for a stream that does not exist.
        """
        RandomFork.seeded(seed, name, *self._positions(name))  # for good: it is never ended

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within it, the default generators give the numbers of this stream; afterwards they continue as before.

        They continue behind the one number that the fork took, whatever was drawn inside. Every rank that has to
        agree with others afterwards enters it as often as they do.

        Raises:
            ValueError: for a stream that does not exist.
        """
        fork = self.fork(name)
        try:
            yield
        finally:
            fork.end()

    def fork(self, name: str) -> RandomFork:
        """:meth:`use` in two halves, for a region that does not begin and end in one function."""
        positions = self._positions(name)  # before a number is drawn for nothing
        number = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        return RandomFork.seeded(number, name, *positions)

    def _positions(self, name: str) -> list[int]:
        if name not in self.apart:
            raise ValueError(f"random stream {name!r} does not exist; there are {', '.join(self.apart)}")
        return [axis.rank for axis in self.apart[name]]


@dataclass
class RandomFork:
    """The default generators' states from before a fork, to be put back."""

    states: Sequence[tuple[torch.Generator, Tensor]]

    @classmethod
    def now(cls) -> RandomFork:
        """The states of this moment, with nothing drawn and nothing changed."""
        return cls([(generator, generator.get_state()) for generator in _generators()])

    @classmethod
    def seeded(cls, *parts: int | str) -> RandomFork:
        """The states of this moment; until :meth:`end` the generators give the numbers of ``named_seed(*parts)``."""
        fork, seed = cls.now(), named_seed(*parts)
        for generator, _ in fork.states:
            generator.manual_seed(seed)
        return fork

    def end(self) -> None:
        """Puts them back; a second call does nothing."""
        for generator, state in self.states:
            generator.set_state(state)
        self.states = ()


def _generators() -> list[torch.Generator]:
    """The default generators of the CPU and of the device in use."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found
