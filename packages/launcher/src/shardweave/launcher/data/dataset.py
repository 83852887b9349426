"""The samples of one corpus or several, by number.

The numbers of samples are 64-bit, and a sample keeps its own whatever happens to other sources::

    id = source * 2^40 + number in the source        a source's validation samples come after those to train on

Nothing is copied ahead: a micro-batch is read from the tokens when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.launcher.data.split import Span, split
from shardweave.launcher.data.tokens import ArrayTokens, Tokens

__all__ = ["IGNORED", "Corpus", "Dataset", "HeldOut", "MicroBatch", "Source"]

IGNORED = -100
"""In place of a target where there is nothing to predict; torch's own choice."""

_BITS = 40
_EVALUATED = 1 << 22
"""The number of a source that is only evaluated on; sources to train on have lower ones."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one replica computes at once."""

    samples: Tensor
    """Numbers of the samples, int64 ``[b]``: what dropout is keyed by."""
    inputs: Tensor
    """Tokens, int64 ``[b, s]``."""
    targets: Tensor
    """The token after each input, int64 ``[b, s]``; :data:`IGNORED` where there is nothing to predict."""
    documents: Tensor | None = None
    """Where documents are kept apart: the number in its row of each input's document, int64 ``[b, s]``."""

    def pinned(self) -> MicroBatch:
        """The same in pinned memory of the host."""
        parts = (self.samples, self.inputs, self.targets, self.documents)
        return MicroBatch(*(part if part is None else part.pin_memory() for part in parts))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device; from pinned memory the copy does not keep the caller waiting."""
        parts = (self.samples, self.inputs, self.targets, self.documents)
        return MicroBatch(*(part if part is None else part.to(device, non_blocking=True) for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens cut into samples and split; they are opened when something of them is first asked for.

    Raises, when it is opened:
        DataError: what cannot be used, or less than one sample to train on.
    """

    name: str
    open: Callable[[], Tokens] = field(repr=False)
    sequence: int
    validation: float = 0.0
    """Share of the tokens that are set aside."""

    @property
    def is_open(self) -> bool:
        """Whether anything of it was asked for."""
        return "spans" in vars(self)

    @cached_property
    def spans(self) -> tuple[Span, Span]:
        """The samples to train on and those for validation."""
        return split(self.open(), self.sequence, self.validation)

    @property
    def fingerprint(self) -> str:
        """Of the tokens; empty while it is not open."""
        return self.spans[0].tokens.fingerprint if self.is_open else ""


@dataclass(frozen=True, eq=False)
class Source:
    """One of the corpora that are trained on."""

    corpus: Corpus
    weight: Fraction = Fraction(1)
    """Its part of the samples, relative to the other sources' weights."""
    number: int = 0
    """By which its samples are known for the whole of a run; different from the other sources'."""

    @property
    def first_id(self) -> int:
        """The id of its first sample."""
        return self.number << _BITS

    @property
    def num_train(self) -> int:
        """Samples to train on: an epoch of this source."""
        return len(self.corpus.spans[0])

    @property
    def num_validation(self) -> int:
        """Samples that are set aside."""
        return len(self.corpus.spans[1])


@dataclass(frozen=True)
class HeldOut:
    """The validation samples of one source."""

    name: str
    first: int
    """The id of the first one; the others follow."""
    count: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of a run."""

    sources: tuple[Source, ...]
    """What is trained on. Those that are not open have no samples that anyone has asked for yet."""
    evaluated: Corpus | None = None
    """What is evaluated on in place of samples set aside; with ``validation`` 0."""
    separate_documents: bool = False
    """Whether documents of a sample do not see each other, and no target is the first token of another one."""

    @classmethod
    def cut(cls, tokens: Tokens, sequence: int, validation: float = 0.0, **options: Any) -> Dataset:
        """The dataset of one corpus: samples of ``sequence + 1`` tokens, the last documents set aside for validation.

        `options`: further fields of the dataset.

        Raises:
            DataError: when there is less than one sample to train on.
        """
        corpus = Corpus(tokens.name, lambda: tokens, sequence, validation)
        corpus.spans  # noqa: B018 - opened, so that an error comes here
        return cls((Source(corpus),), **options)

    @classmethod
    def of_tokens(cls, tokens: NDArray[Any], sequence: int, validation: float = 0.0) -> Dataset:
        """The dataset of one document's tokens, ``[n]``, in memory."""
        return cls.cut(ArrayTokens.of("tokens", [tokens]), sequence, validation)

    @property
    def sequence(self) -> int:
        """Inputs of a sample."""
        return self.sources[0].corpus.sequence

    @property
    def fingerprint(self) -> str:
        """Of everything that is open: equal on two ranks exactly when they read the same."""
        corpora = [*(source.corpus for source in self.sources), *([self.evaluated] if self.evaluated else [])]
        if len(corpora) == 1:
            return corpora[0].fingerprint
        text = "\0".join(f"{corpus.name}\0{corpus.fingerprint}" for corpus in corpora)
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_train(self) -> int:
        """Samples to train on, over all sources that are open."""
        return sum(source.num_train for source in self.sources if source.corpus.is_open)

    @property
    def num_validation(self) -> int:
        """Samples to evaluate on, over all sources that are open."""
        return sum(part.count for part in self.held_out)

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """The validation samples, by source; sources without any are left out."""
        if self.evaluated is not None:
            count = len(self.evaluated.spans[0])
            return (HeldOut(self.evaluated.name, _EVALUATED << _BITS, count),) if count else ()
        return tuple(
            HeldOut(source.corpus.name, source.first_id + source.num_train, source.num_validation)
            for source in self.sources
            if source.corpus.is_open and source.num_validation
        )

    def validation_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of validation samples, of which the first has number 0: int64, of the shape of `numbers`."""
        parts = self.held_out
        counts = np.array([part.count for part in parts], np.int64)
        ends = np.cumsum(counts)
        which = np.searchsorted(ends, numbers, side="right")
        if (numbers < 0).any() or (which == len(parts)).any():
            raise IndexError(f"validation samples {numbers} of {self.num_validation}")
        begins = np.array([part.first for part in parts], np.int64)
        return (begins - (ends - counts))[which] + numbers if parts else numbers

    def within_an_epoch(self, ids: Sequence[int]) -> bool:
        """Whether samples to train on are of no source more than it has: they may then be expected to differ."""
        counts = Counter(number >> _BITS for number in ids)
        return all(count <= self._source(number).num_train for number, count in counts.items())

    def windows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of samples, int64 ``[b, s + 1]``.

        IndexError: there is no such sample.
        """
        return self._gather(ids, Span.windows)

    def micro_batch(self, ids: NDArray[np.int64], windows: NDArray[np.int64] | None = None) -> MicroBatch:
        """The samples of the given numbers, int64 ``[b]``, as tensors. `windows`: their tokens, if they were changed.

        IndexError: there is no such sample.
        """
        window = self.windows(ids) if windows is None else windows
        targets, documents = window[:, 1:].copy(), None
        if self.separate_documents:
            numbers = self._gather(ids, Span.documents)  # [b, s + 1]
            targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
            documents = torch.from_numpy(numbers[:, :-1] - numbers[:, :1])
        inputs = np.ascontiguousarray(window[:, :-1])
        return MicroBatch(
            torch.from_numpy(ids.copy()), torch.from_numpy(inputs), torch.from_numpy(targets), documents
        )

    def _gather(
        self, ids: NDArray[np.int64], read: Callable[[Span, NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """What `read` gives for the samples of each span, in the order of `ids`."""
        found = np.empty((len(ids), self.sequence + 1), np.int64)
        numbers, samples = ids >> _BITS, ids & ((1 << _BITS) - 1)
        for number in np.unique(numbers).tolist():
            train, aside = self._corpus(number).spans
            here = numbers == number
            for span, before, chosen in (
                (train, 0, here & (samples < len(train))),
                (aside, len(train), here & (samples >= len(train))),
            ):
                if chosen.any():
                    found[chosen] = read(span, samples[chosen] - before)
        return found

    def _corpus(self, number: int) -> Corpus:
        if number == _EVALUATED and self.evaluated is not None:
            return self.evaluated
        return self._source(number).corpus

    def _source(self, number: int) -> Source:
        for source in self.sources:
            if source.number == number:
                return source
        raise IndexError(f"samples of source {number}, which this dataset does not have")
