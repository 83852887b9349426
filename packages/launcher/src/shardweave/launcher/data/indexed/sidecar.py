"""PREFIX.json, beside PREFIX.bin and PREFIX.idx: what Megatron's two files do not say of themselves.

Ids mean nothing without the tokenizer that made them, and a corpus read with another one trains without complaint. So
the tokenizer is recorded, with what bits per byte need. Files without it are read as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.indexed.layout import json_path

__all__ = ["Sidecar", "TokenizerRecord"]

FORMAT = 1
_LARGEST = 2**26
"""Bytes. What is larger is text that happens to have this name, and not worth reading."""


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made the ids."""

    name: str
    fingerprint: str
    vocab: int
    end_of_text: int | None = None
    """The token behind each document; None when there is none."""


@dataclass(frozen=True)
class Sidecar:
    """What PREFIX.json says."""

    tokenizer: TokenizerRecord | None
    """None when whoever wrote the files did not say."""
    documents: int
    tokens: int
    fingerprint: str
    """Of the two files (see `fingerprint`): a PREFIX.json that was left beside others is found out."""
    text_bytes: int | None = None
    """Of the text in UTF-8, without what separates documents: the loss in bits per byte divides by it."""
    sources: tuple[str, ...] = ()
    """The files of text, as they were named."""

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    def write(self, prefix: Path) -> None:
        """Writes PREFIX.json. For who makes both files otherwise; an `IndexedWriter` writes its own."""
        json_path(prefix).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def read(cls, prefix: Path) -> Sidecar | None:
        """What is written beside PREFIX.bin; None when there is nothing, or a file of this name that is not ours.

        Raises:
            DataError: when it cannot be read, or is ours and damaged or of a later format.
        """
        path = json_path(prefix)
        try:
            if not path.is_file() or os.stat(path).st_size > _LARGEST:
                return None
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or not {"format", "fingerprint"} <= values.keys():
            return None
        if values["format"] != FORMAT:
            raise DataError(
                f"{path} is of format {values['format']!r}, and this version knows {FORMAT}; update shardweave, "
                "or remove the file and name the tokenizer in data.tokenizer"
            )
        try:
            return _parse(values)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({error}); remove it and name the tokenizer in data.tokenizer, or build the "
                "files again"
            ) from None


def _parse(values: Mapping[str, Any]) -> Sidecar:
    tokenizer = values["tokenizer"]
    text_bytes = values["text_bytes"]
    return Sidecar(
        tokenizer=None
        if tokenizer is None
        else TokenizerRecord(
            name=_typed(tokenizer, "name", str),
            fingerprint=_typed(tokenizer, "fingerprint", str),
            vocab=_typed(tokenizer, "vocab", int),
            end_of_text=None if tokenizer["end_of_text"] is None else _typed(tokenizer, "end_of_text", int),
        ),
        documents=_typed(values, "documents", int),
        tokens=_typed(values, "tokens", int),
        fingerprint=_typed(values, "fingerprint", str),
        text_bytes=None if text_bytes is None else _typed(values, "text_bytes", int),
        sources=tuple(str(source) for source in _typed(values, "sources", list)),
    )


def _typed(values: Mapping[str, Any], key: str, kind: type) -> Any:
    value = values[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key}: {value!r}")
    return value
