"""What ranks show each other before a communication, and the words for a difference.

A record has a fixed size, so that any two different collectives meet in the same exchange::

    byte  0         16       18                                1024
          | digest  | length | JSON: number, fields, call site, padding |

Texts are cut where they do not fit (the sizes of a thousand parts); the digest is of the whole, and it decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from ..text import ranks_text

__all__ = ["LENGTH", "CollectiveMismatch", "Record", "mismatch"]

LENGTH = 1024
"""Bytes of a record."""

_DIGEST, _HEAD = 16, 18


class CollectiveMismatch(RuntimeError):
    """Ranks that have to make the same call make different ones.

    Raised on every rank that takes part, with the same text, before anything of the call is sent.
    """


@dataclass(frozen=True)
class Record:
    """One rank's call, as the others see it."""

    rank: int
    """Global rank."""
    number: int
    """How many calls of the axis this makes; from 1."""
    fields: Mapping[str, str]
    """What has to be alike, by name."""
    site: str
    """The line that made the call; may differ."""
    kind: str = ""
    """What may differ and is told all the same: which end of a message it is, and the shape there."""
    digest: bytes = b""
    """Of number and fields before anything was cut."""

    @classmethod
    def of(cls, rank: int, number: int, fields: Mapping[str, str], site: str, kind: str = "") -> Record:
        """A rank's own record."""
        whole = json.dumps([number, *sorted(fields.items())]).encode()
        return cls(rank, number, fields, site, kind, sha256(whole).digest()[:_DIGEST])

    def pack(self) -> bytes:
        """:data:`LENGTH` bytes."""
        limit = LENGTH
        while len(body := self._body(limit)) > LENGTH - _HEAD:
            limit //= 2
        return (self.digest + len(body).to_bytes(_HEAD - _DIGEST, "little") + body).ljust(LENGTH, b"\0")

    @classmethod
    def unpack(cls, rank: int, raw: bytes) -> Record:
        """The record of ``rank``, from its bytes."""
        length = int.from_bytes(raw[_DIGEST:_HEAD], "little")
        number, kind, site, fields = json.loads(raw[_HEAD : _HEAD + length])
        return cls(rank, number, fields, site, kind, raw[:_DIGEST])

    def _body(self, limit: int) -> bytes:
        """``limit``: characters of each text."""
        fields = {name: _cut(value, limit) for name, value in self.fields.items()}
        return json.dumps([self.number, self.kind, _cut(self.site, limit), fields]).encode()

    def __str__(self) -> str:
        fields = dict(self.fields)
        words = [self.kind or fields.pop("collective")]
        if "shape" in fields:
            words.append(f"of {fields.pop('dtype')} {fields.pop('shape')}")
        words.append(f"on {fields.pop('axis')}")
        return " ".join(words) + "".join(f", {name} {value}" for name, value in fields.items())


def mismatch(records: Sequence[Record], where: str) -> CollectiveMismatch | None:
    """The error of ranks whose records differ; ``None`` when all are alike.

    ``records``: of all members, in the same order on each of them, so that each raises the same text.
    ``where``: what they have in common: ``collective 3 of ranks 0, 1``.
    """
    alike: dict[bytes, list[Record]] = {}
    for record in records:
        alike.setdefault(record.digest, []).append(record)
    if len(alike) < 2:
        return None
    first, second = (same[0] for same in list(alike.values())[:2])
    lines = [f"ranks {first.rank} and {second.rank} disagree on {where}: {_difference(first, second)}"]
    for same in alike.values():
        lines += [f"  rank {same[0].rank}: {same[0]}", f"    at {same[0].site or 'an unknown line'}"]
        if len(same) > 1:
            lines.append(f"    so do {ranks_text([record.rank for record in same[1:]])}")
    lines.append(
        "Nothing of it was sent. All ranks of an axis have to make the same calls in the same order; look at "
        "which of these lines the ranks should not have come to, or should have come to with another tensor."
    )
    return CollectiveMismatch("\n".join(lines))


def _difference(first: Record, second: Record) -> str:
    """The names of what differs."""
    names = [
        name
        for name in dict.fromkeys((*first.fields, *second.fields))
        if first.fields.get(name) != second.fields.get(name)
    ]
    if first.number != second.number:
        names.insert(0, f"number ({first.number} and {second.number})")
    if "collective" in names:  # what belongs to one kind only is no difference of its own
        names = [name for name in names if name in first.fields and name in second.fields]
    return ", ".join(names) or "a text that is too long to be shown"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."
