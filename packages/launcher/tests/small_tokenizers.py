"""Tokenizers of files, made in a blink for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ENDING = "<|endoftext|>"
WORDS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, ",
    "naïve – café\n",
)


def byte_level(
    texts: Iterable[str] = WORDS * 3, vocab: int = 300, special: tuple[str, ...] = (ENDING,)
) -> Tokenizer:
    """A byte-level BPE, as GPT-2 has it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def sentencepiece() -> Tokenizer:
    """Unigram over "▁"; its end-of-text token is a piece of the model, too, and the likeliest one."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), ("\u2581the", -1.0), ("the", -1.5)]
    pieces += [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz</>é"]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["</s>", "<unk>"])
    return made


def saved(tokenizer: Tokenizer, folder: Path, **files: Any) -> Path:
    """The directory of a tokenizer, with more JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
