"""Tokenizers from files: Hugging Face's ``tokenizer.json``, and GPT-2's ``vocab.json`` with ``merges.txt``.

The library `tokenizers` does the work; both kinds of files become one definition, the content of a ``tokenizer.json``.
What in such a file is not for a corpus is left out: truncation and padding, which cut documents to the length that
somebody once used, the post-processor, which puts special tokens around every text, and BPE dropout, which draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from shardweave.launcher.data.end_of_text import find_end_of_text
from shardweave.launcher.data.errors import DataError, EndOfTextError
from shardweave.launcher.data.texts import whole
from shardweave.launcher.data.token_bytes import byte_level, token_bytes
from shardweave.launcher.data.tokenizer import AUTO

__all__ = ["FileTokenizer", "read_tokenizer"]

_NOT_FOR_CORPORA = ("truncation", "padding", "post_processor")
_OF_NO_TOKEN = ("version", "decoder")
"""What has no part in which tokens a text has."""
_WRITTEN = "tokenizer.json"


@dataclass(frozen=True, eq=False)
class FileTokenizer:
    """A tokenizer of the library's. It satisfies :class:`.tokenizer.Tokenizer`."""

    name: str
    fingerprint: str
    vocab: int
    end_of_text: int
    library: Library = field(repr=False)
    definition: Mapping[str, Any] = field(repr=False)
    """The content of a ``tokenizer.json``."""
    spelled: Mapping[int, tuple[int, ...]] = field(repr=False)
    """Special tokens that the model finds in a text by itself, and what their letters are one by one."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text: int32 ``[n]``. What is no UTF-8 in it is encoded as U+FFFD."""
        return self._array(self.library.encode(whole(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """As `encode` of each, on all cores unless ``TOKENIZERS_PARALLELISM=false`` is set."""
        found = self.library.encode_batch_fast([whole(text) for text in texts], add_special_tokens=False)
        return [self._array(one.ids) for one in found]

    def _array(self, tokens: list[int]) -> NDArray[np.int32]:
        found = np.array(tokens, np.int32)
        if self.spelled and np.isin(found, list(self.spelled)).any():
            letters = [self.spelled.get(token, (token,)) for token in tokens]
            return np.array([token for some in letters for token in some], np.int32)
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; ends of documents are blank lines, numbers without a token are left out."""
        documents: list[list[int]] = [[]]
        for token in tokens:
            if token == self.end_of_text:
                documents.append([])
            elif token < self.vocab:
                documents[-1].append(token)
        return "\n\n".join(self.library.decode(some, skip_special_tokens=False) for some in documents)

    @cached_property
    def token_bytes(self) -> NDArray[np.int32]:
        """How many bytes of text each token stands for, 0 for special ones: int32 ``[vocab]``."""
        added = self.library.get_added_tokens_decoder()
        special = {token for token, how in added.items() if how.special} | {self.end_of_text}
        return token_bytes(self.library.get_vocab(), self.vocab, self.definition, special)


def read_tokenizer(name: str, end_of_text: str | int = AUTO) -> FileTokenizer:
    """The tokenizer in a file or directory. See :func:`.tokenizer.open_tokenizer`.

    Raises:
        DataError: as there.
    """
    definition, folder = _definition(name)
    try:
        library = Library.from_str(json.dumps(definition))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{name} is not a tokenizer that this version of `tokenizers` reads: {error}"
        ) from None
    names = library.get_vocab(with_added_tokens=True)
    if not names:
        raise DataError(f"{name} has an empty vocabulary")
    closing = find_end_of_text(None if end_of_text == AUTO else end_of_text, names, folder, name)
    library.encode_special_tokens = True
    added = library.get_added_tokens_decoder()
    if closing not in added or not added[closing].special:  # then it would be found in texts
        ending = str(library.id_to_token(closing))
        library.add_special_tokens([AddedToken(ending, special=True, normalized=False)])
        added = library.get_added_tokens_decoder()
    special = {token: how.content for token, how in added.items() if how.special}
    spelled = _spelled(library, definition, special)
    if spelled.get(closing) == () or (closing in spelled and not special[closing].isascii()):
        raise EndOfTextError(f"{special[closing]!r} is a piece of texts in {name}; name a special token")
    return FileTokenizer(
        name,
        _fingerprint(definition),
        max(names.values()) + 1,
        closing,
        library,
        definition,
        spelled,
    )


def _definition(name: str) -> tuple[dict[str, Any], Path | None]:
    """What a ``tokenizer.json`` says or would say, and the directory whose other files belong to it."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / _WRITTEN).is_file():
            return _read(path / _WRITTEN), path
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _gpt2(path), path
        raise DataError(f"{name} has no tokenizer.json, and no vocab.json with merges.txt")
    if not path.exists():
        raise DataError(
            f"there is no tokenizer {name} (relative to {Path.cwd()}); use byte, a tokenizer.json, or a directory "
            "with the files of a tokenizer"
        )
    return _read(path), path.parent if path.name == _WRITTEN else None


def _read(path: Path) -> dict[str, Any]:
    found = _json(path)
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise DataError(f"{path} is not a tokenizer.json of Hugging Face's: it has no `model`")
    found = {key: None if key in _NOT_FOR_CORPORA else value for key, value in found.items()}
    if found["model"].get("dropout"):
        found["model"]["dropout"] = None
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None


def _gpt2(folder: Path) -> dict[str, Any]:
    """The ``tokenizer.json`` that GPT-2's two files mean."""
    names = _json(folder / "vocab.json")
    if not isinstance(names, dict):
        raise DataError(f"{folder / 'vocab.json'} is not an object of tokens and their numbers")
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / 'merges.txt'} cannot be read: {error}") from None
    merges = [line.strip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = ("<|endoftext|>", "<|padding|>")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": names[name], "content": name} | how for name in special if name in names],
        "normalizer": None,
        "pre_tokenizer": kind,
        "post_processor": None,
        "decoder": kind,
        "model": {"type": "BPE", "vocab": names, "merges": merges},
    }


def _fingerprint(definition: Mapping[str, Any]) -> str:
    """The same for two files that mean the same, though a library has written one of them anew."""
    # What is not there, null, empty and false are the same to the library; a 0 may be a token's number.
    model = {
        key: value
        for key, value in definition["model"].items()
        if not (value is None or value is False or value == "")
    }
    if isinstance(model.get("merges"), list):  # once "a b", today ["a", "b"]
        model["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    rest = {key: value for key, value in definition.items() if key not in (*_NOT_FOR_CORPORA, *_OF_NO_TOKEN)}
    text = json.dumps(rest | {"model": model}, sort_keys=True)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _spelled(
    library: Library, definition: Mapping[str, Any], special: Mapping[int, str]
) -> dict[int, tuple[int, ...]]:
    """Special tokens that are in the model's own vocabulary, too, by number, with the tokens of their letters.

    Such a model may find one in a text though the library does not look for it: Unigram's best path, or a word that is
    looked up as a whole, leads over it. A token for what is unknown is meant where it is found.
    """
    own, model = library.get_vocab(with_added_tokens=False), definition["model"]

    def tokens(letter: str) -> list[int]:
        if byte_level(definition):
            return library.encode(letter, add_special_tokens=False).ids
        return [
            one.id for one in library.model.tokenize(letter)
        ]  # without the space that may come before a text

    found = {}
    for token, text in special.items():
        if text in own and text != model.get("unk_token") and token != model.get("unk_id"):
            letters = [one for letter in text for one in tokens(letter)]
            found[token] = tuple(one for one in letters if one not in special)
    return found
