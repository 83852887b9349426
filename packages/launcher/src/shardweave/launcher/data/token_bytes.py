"""How many bytes of text each token stands for: what makes losses of different tokenizers comparable, as bits per byte.

Over the tokens of a text these numbers add up to its length in UTF-8, as far as the tokenizer keeps the text. Which
bytes a token's name means depends on how the tokenizer writes them:

    byte-level (GPT-2)       every character of the name is a byte: "Ġthe" is " the"
    sentencepiece (Llama 2)  "▁" is a space, "<0x0A>" is a byte that has no token of its own, the rest is text
    WordPiece (BERT)         "##ing" goes on with a word
    end of word (CLIP)       "ing</w>" ends a word: a space
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["byte_level", "token_bytes"]

_SPACE = "\u2581"
_ONE_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def _bytes_as_characters() -> frozenset[str]:
    """The 256 characters that byte-level tokenizers write bytes as: printable Latin-1, then from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return frozenset(map(chr, [*plain, *range(256, 256 + 256 - len(plain))]))


_ALPHABET = _bytes_as_characters()


def byte_level(definition: Mapping[str, Any]) -> bool:
    """Whether the tokens of a ``tokenizer.json`` are written in the byte-level alphabet."""
    parts = [definition.get(name) for name in ("pre_tokenizer", "decoder", "normalizer")]
    return any(kind == "ByteLevel" for part in parts for kind in _kinds(part))


def _kinds(part: object) -> Iterator[str]:
    """The types of a part of a ``tokenizer.json`` and of those that it is a sequence of."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for inner in part.values():
            if isinstance(inner, list):
                for one in inner:
                    yield from _kinds(one)


def token_bytes(
    names: Mapping[str, int], vocab: int, definition: Mapping[str, Any], special: Collection[int]
) -> NDArray[np.int32]:
    """The bytes of each token, int32 ``[vocab]``; 0 of those in `special` and of numbers without a token.

    `names`: what each token is written as, added tokens included; `definition`: the ``tokenizer.json``.
    """
    model = definition.get("model", {})
    goes_on = (model.get("continuing_subword_prefix") or "") if model.get("type") == "WordPiece" else ""
    ends = model.get("end_of_word_suffix") or ""
    added = {int(token["id"]) for token in definition.get("added_tokens", ())}
    in_bytes = byte_level(definition)
    found = np.zeros(vocab, np.int32)
    for name, token in names.items():
        if token in special:
            continue
        if token in added:
            found[token] = len(name.encode("utf-8", "replace"))
        elif in_bytes:
            # A name outside the alphabet, which a damaged vocabulary has, stands for itself.
            stem = name[: len(name) - len(ends)] if ends and name.endswith(ends) else name
            within = len(stem) if _ALPHABET.issuperset(stem) else len(stem.encode("utf-8", "replace"))
            found[token] = within + (stem != name)
        elif _ONE_BYTE.fullmatch(name):
            found[token] = 1
        else:
            text = name.removeprefix(goes_on).replace(_SPACE, " ")
            text = text[: -len(ends)] + " " if ends and text.endswith(ends) else text
            found[token] = len(text.encode("utf-8", "replace"))
    return found
