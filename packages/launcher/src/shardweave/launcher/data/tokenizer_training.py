"""A tokenizer learned from the user's own text: byte-level BPE, as GPT-2 has it (Radford et al., 2019, section 2.2).

Every text is made of its 256 bytes, so nothing is ever unknown; what comes up often together becomes one token. The
library counts words as it reads, so memory is that of the different words, not of the text. Counting and merging give
the same result on any number of cores.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardweave.launcher.data.errors import DataError, DiskError
from shardweave.launcher.data.texts import BLOCK, Kind, TextFile, blocks, documents, find_texts, whole

__all__ = ["ENDING", "Trained", "train"]

ENDING = "<|endoftext|>"
"""The token that closes documents."""
_BYTES = 256
_LARGEST = 1_000_000
_LONG = 1 << 16
"""Characters that are given to the library at once."""


@dataclass(frozen=True)
class Trained:
    """What has come of it."""

    vocab: int
    documents: int
    warnings: tuple[str, ...]


def train(sources: Sequence[str], vocab: int, out: Path, *, field: str = "text") -> Trained:
    """Learns `vocab` tokens from some texts, and writes them to a directory that transformers reads, too.

    Args:
        sources: paths, directories or globs.
        vocab: tokens, the 256 bytes and the end of text among them. There are fewer when the text has no more to give.
        out: the directory, which is made.
        field: where the text is in a line or a row.

    Raises:
        DataError: for texts that are not there or cannot be read, or that hold nothing, a directory that is there
            already, and a vocabulary that is too small or too large.
        DiskError: the directory cannot be written.
    """
    if not _BYTES < vocab <= _LARGEST:
        raise DataError(f"--vocab {vocab}: it has the {_BYTES} bytes and {ENDING}, and at most {_LARGEST:,}")
    if out.exists():
        raise DataError(f"--out {out} is there already; give a directory that is not")
    files = [file for source in sources for file in find_texts(source)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[ENDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = _Texts(files, field)
    made.train_from_iterator(texts, trainer)
    if not texts.documents:
        raise DataError(f"{', '.join(sources)}: there is nothing to learn from: every document is empty")
    _write(made, out)
    found = made.get_vocab_size()
    warning = f"the text has no more than {found:,} tokens to give, and {vocab:,} were asked for"
    return Trained(found, texts.documents, (warning,) if found < vocab else ())


@dataclass
class _Texts:
    """The texts of some files in stretches of no great length; documents are counted."""

    files: Sequence[TextFile]
    field: str
    documents: int = 0

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            if file.kind is Kind.TEXT:
                self.documents += file.size > 0
                yield from _stretches(blocks(file))
            else:
                for text in documents(file, field=self.field):
                    self.documents += bool(text)
                    yield from _stretches(text[at : at + BLOCK] for at in range(0, len(text), BLOCK))


def _stretches(text: Iterator[str]) -> Iterator[str]:
    """A text cut behind ends of lines, where no word is cut; a line of great length wherever."""
    rest = ""
    for block in text:
        rest += block
        while len(rest) > _LONG:
            cut = rest.rfind("\n", 0, _LONG) + 1 or _LONG
            yield whole(rest[:cut])
            rest = rest[cut:]
    if rest:
        yield whole(rest)


def _write(made: Tokenizer, out: Path) -> None:
    """All files, or no directory."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ENDING,
        "bos_token": ENDING,
        "clean_up_tokenization_spaces": False,
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            made.save(str(place / "tokenizer.json"))
            (place / "tokenizer_config.json").write_text(
                json.dumps(settings, indent=2) + "\n", encoding="utf-8"
            )
            place.chmod(0o777 & ~_umask())
            os.rename(place, out)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except OSError as error:
        raise DiskError(f"{error.filename or out} cannot be written: {error.strerror}") from None


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now
