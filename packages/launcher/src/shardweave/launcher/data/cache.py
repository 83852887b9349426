"""Tokens of text that a run reads as it is: made once, kept in the user's cache, mapped by every rank.

    $SHARDWEAVE_CACHE, else $XDG_CACHE_HOME/shardweave, else ~/.cache/shardweave
        tokens/KEY.bin .idx .json     a corpus, named after its files, the tokenizer and the field
        tokens/KEY.lock               held by the one process that makes it; the others of a node wait

The key holds path, size and time of every file, so a file that was changed is another corpus. What is there already was
made of the same text. Nothing is ever removed; all of the directory may be, whenever no run is at work.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from shardweave.launcher.data.build import Watcher, build
from shardweave.launcher.data.errors import BuildError, DataError, DiskError
from shardweave.launcher.data.indexed import IndexedTokens
from shardweave.launcher.data.indexed.layout import idx_path
from shardweave.launcher.data.texts import TextFile
from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["cache_folder", "cached_tokens"]

_FORMAT = 1
"""Of what is kept: another number makes it all worthless."""


def cache_folder() -> Path:
    """Where what can be made again is kept for this user."""
    own = os.environ.get("SHARDWEAVE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    general = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(general) if general else Path.home() / ".cache") / "shardweave"
    except RuntimeError:  # a user without a home
        raise DataError("there is no home directory to keep tokens in; set SHARDWEAVE_CACHE to one") from None


def cached_tokens(
    name: str, files: Sequence[TextFile], words: Tokenizer, *, field: str, watcher: Watcher | None = None
) -> IndexedTokens:
    """The tokens of some files, made now if nobody has made them before.

    Of several processes that ask at once one makes them, and the others wait.

    Raises:
        DataError: as `build`; a cache that cannot be written is named, with the way out.
    """
    folder = cache_folder() / "tokens"
    prefix = folder / _key(files, words, field)
    index = idx_path(prefix)
    if not index.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(f"{prefix}.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not index.is_file():
                    # What lies there without an index was left by somebody who did not end.
                    build((name,), prefix, words, files=files, field=field, overwrite=True, watcher=watcher)
        except (OSError, DiskError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(
                f"the tokens of {name} cannot be kept in the cache {folder}: {reason}; set SHARDWEAVE_CACHE to a "
                "directory that can be written, or make them with `shardweave data build`"
            ) from None
        except BuildError as error:
            raise DataError(f"the tokens of {name} could not be made: {error}") from None
    tokens = IndexedTokens(prefix)
    tokens.name = name
    return tokens


def _key(files: Sequence[TextFile], words: Tokenizer, field: str) -> str:
    described = [[os.path.realpath(file.path), file.kind.value, file.size, file.modified] for file in files]
    text = json.dumps([_FORMAT, words.fingerprint, words.end_of_text, field, described])
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
