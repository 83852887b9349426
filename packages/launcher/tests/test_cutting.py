"""Long texts in stretches: the same tokens as of the whole, for tokenizers that split texts in all kinds of ways."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from packages.launcher.tests.small_tokenizers import ENDING, byte_level, saved, sentencepiece
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from shardweave.launcher.data import cutting
from shardweave.launcher.data.cutting import CONTEXT, LongText, find_cut
from shardweave.launcher.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer


def _words() -> list[str]:
    return Path(__file__).with_name("short.txt").read_text(encoding="utf-8").split()


def _text(length: int, seed: int = 0) -> str:
    """Words between all kinds of spaces, with numbers, long runs of spaces and other scripts among them."""
    draw, parts, words = random.Random(seed), [], _words()
    between = [" ", " ", " ", "\n", "\n\n", "\r\n", "  ", "\t", " " * 37, "\n" * 5, "\u00a0", ""]
    others = [
        "日本語テキスト",
        "naïve",
        "\U0001f600\U0001f601",
        "12345678901",
        "don't",
        "x=f(y)[0];",
        "----",
        "_a_b",
    ]
    while length > 0:
        parts += [draw.choice(words if draw.random() < 0.8 else others), draw.choice(between)]
        length -= len(parts[-1]) + len(parts[-2])
    return "".join(parts)


def _merging_across_words() -> Library:
    """A BPE without pre-tokenizer, as Llama 2's: the whole text is one word to it."""
    made = byte_level([_text(20_000)], vocab=600)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made


def _with_space_in_front() -> Library:
    made = byte_level([_text(20_000)], vocab=600)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def _composing() -> Library:
    made = byte_level([_text(20_000)], vocab=600)
    made.normalizer = normalizers.NFC()
    return made


KINDS = {
    "gpt2": lambda: byte_level([_text(20_000)], vocab=600),
    "llama2": _merging_across_words,
    "prefix": _with_space_in_front,
    "nfc": _composing,
    "unigram": sentencepiece,
}


@pytest.fixture(scope="module", params=KINDS)
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    return open_tokenizer(
        str(saved(KINDS[request.param](), folder)), ENDING if request.param != "unigram" else "</s>"
    )


def _blocks(text: str, size: int) -> Iterable[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def test_stretches_have_the_tokens_of_the_whole(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "CONTEXT", 256)
    monkeypatch.setattr(cutting, "REGION", 512)
    for seed in range(3):
        text = _text(30_000, seed) + "e\u0301" * 20
        encoding = LongText(words)
        found = list(encoding.encode(_blocks(text, 2048)))
        assert np.array_equal(np.concatenate(found), words.encode(text))
        assert len(found) > 5
        assert encoding.longest < 10_000


def test_places_are_ends_of_lines_where_there_are_any() -> None:
    text = "word word word\n" * 300
    cut = find_cut(ByteTokenizer(), text, text)
    assert cut is not None
    assert cut % 15 == 0


def test_nothing_is_cut_within_a_run_that_is_longer_than_the_context() -> None:
    """Where it would show cannot be seen from so near: of 16 spaces to a token, the last of all are alone."""
    for letter in (" ", "a", "7", "-"):
        assert find_cut(ByteTokenizer(), letter * 5000, letter * 500_000) is None
        assert find_cut(ByteTokenizer(), letter * 5000, letter * 3 + "Q" + letter * 500_000) is None
    nearly = "a" * (CONTEXT - 1)
    assert find_cut(ByteTokenizer(), f" {nearly}", f" {nearly} {nearly} " * 9) == 0


def test_a_text_without_a_place_stays_whole(tmp_path: Path) -> None:
    words = open_tokenizer(str(saved(byte_level(), tmp_path)))
    encoding = LongText(words)
    found = list(encoding.encode(_blocks("a" * 20_000, 2048)))
    assert len(found) == 1
    assert encoding.longest == 20_000
    assert list(LongText(words).encode([])) == []


def test_a_cut_that_shows_is_refused(tmp_path: Path) -> None:
    """A whole-word tokenizer that puts a token of its own in front of each text never gives equal halves."""
    made = Library(models.WordLevel({"<unk>": 0, "\u2581": 1, "a": 2, ENDING: 3}, unk_token="<unk>"))
    made.normalizer = normalizers.Prepend("\u2581 ")
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = open_tokenizer(str(saved(made, tmp_path)))
    assert words.encode("a a").tolist() == [1, 2, 2]
    assert find_cut(words, "a " * 2000, "a " * 2000) is None
    encoding = LongText(words)
    (tokens,) = encoding.encode(_blocks("a " * 4000, 2048))
    assert tokens.tolist() == [1] + [2] * 4000
