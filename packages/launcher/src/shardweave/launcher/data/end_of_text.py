"""Which token closes a document, by the files that come with a tokenizer.

Published models write it in one of three files beside ``tokenizer.json``; where none of them is there, or none says
it, by one of the names that nearly all vocabularies use. Guessing further would be quiet ruin: a document's border
that the model never sees. So then a person is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave.launcher.data.errors import DataError, EndOfTextError

__all__ = ["USUAL", "find_end_of_text"]

USUAL = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Of GPT-2, of sentencepiece and Llama 2, of Llama 3, of Gemma."""


def find_end_of_text(
    wanted: str | int | None, names: Mapping[str, int], folder: Path | None, what: str
) -> int:
    """The token that closes documents.

    `wanted`: it, as text or as its number; None: as the files in `folder` say (None: there are none to ask). `names`:
    every token's number by what it is written as. `what`: the tokenizer, for a person.

    Raises:
        EndOfTextError: the vocabulary does not have it, or nothing says which one it is.
        DataError: a file in `folder` cannot be read.
    """
    if wanted is not None:
        return _given(wanted, names, what)
    said = None if folder is None else _by_files(folder)
    if said is not None:
        return _given(said, names, f"{what}, whose files name it,")
    for name in USUAL:
        if name in names:
            return names[name]
    raise EndOfTextError(
        f"nothing beside {what} says which token closes a document, and none of "
        f"{', '.join(USUAL)} is in it; name the token, or give its number"
    )


def _given(wanted: str | int, names: Mapping[str, int], what: str) -> int:
    if isinstance(wanted, str) and wanted in names:
        return names[wanted]
    if isinstance(wanted, str) and wanted.isdecimal():
        wanted = int(wanted)
    if isinstance(wanted, int):
        if wanted in names.values():
            return wanted
        largest = max(names.values(), default=-1)
        raise EndOfTextError(f"{what} has no token number {wanted}; the last one is {largest}")
    usual = [name for name in USUAL if name in names]
    hint = f"; it has {' and '.join(usual)}" if usual else ""
    raise EndOfTextError(f"{what} has no token {wanted!r}{hint}")


def _by_files(folder: Path) -> str | int | None:
    """What the files of a published model call it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(folder / file).get("eos_token")
        if isinstance(token, dict):  # with how it is matched
            token = token.get("content")
        if isinstance(token, str):
            return token
    for file in ("config.json", "generation_config.json"):
        number = _json(folder / file).get("eos_token_id")
        if isinstance(number, list):  # a chat model ends at several; the first is that of plain text
            number = number[0] if number else None
        if isinstance(number, int):
            return number
    return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
