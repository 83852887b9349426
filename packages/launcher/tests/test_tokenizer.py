"""Tokenizers of files: which tokens, which of them ends a document, and what a text cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packages.launcher.tests.small_tokenizers import ENDING, WORDS, byte_level, saved, sentencepiece
from tokenizers import Tokenizer as Library
from tokenizers import processors

from shardweave.launcher.changes import Kind, row_of
from shardweave.launcher.data.errors import DataError, EndOfTextError
from shardweave.launcher.data.file_tokenizer import _fingerprint
from shardweave.launcher.data.tokenizer import Tokenizer, open_tokenizer
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.resumable import RunValues, changes_since, plain_settings
from shardweave.launcher.shape import transformer_config

TEXTS = [*WORDS, "", "a\0b\r\n\n\n  c", "\U0001f600 日本語", ENDING, f"x{ENDING}{ENDING}y"]


def _opened(made: Library, folder: Path, end_of_text: str | int = "auto", **files: Any) -> Tokenizer:
    return open_tokenizer(str(saved(made, folder, **files)), end_of_text)


def test_a_text_comes_back_and_a_batch_is_its_texts(tmp_path: Path) -> None:
    for number, made in enumerate((byte_level(), sentencepiece())):
        words = _opened(made, tmp_path / str(number))
        alone = [words.encode(text) for text in TEXTS]
        assert [words.decode(tokens.tolist()) for tokens in alone] == TEXTS
        for one, same in zip(alone, words.encode_batch(TEXTS), strict=True):
            assert one.dtype == same.dtype
            assert one.tolist() == same.tolist()


def test_tokens_are_the_librarys_own(tmp_path: Path) -> None:
    made = byte_level()
    words = _opened(made, tmp_path)
    assert words.vocab == made.get_vocab_size()
    assert words.end_of_text == made.token_to_id(ENDING)
    assert words.encode(WORDS[0]).tolist() == made.encode(WORDS[0]).ids


def test_a_document_cannot_end_itself(tmp_path: Path) -> None:
    """The library finds special tokens in texts unless told otherwise; Unigram's best path leads over one anyway."""
    for number, (made, ending) in enumerate(((byte_level(), ENDING), (sentencepiece(), "</s>"))):
        words = _opened(made, tmp_path / str(number))
        text = f"the {ending}{ending} man{ending}"
        assert words.end_of_text in made.encode(text).ids
        for tokens in (words.encode(text), words.encode_batch([text, text])[1]):
            assert words.end_of_text not in tokens
            assert words.decode(tokens.tolist()) == text


def test_an_ending_that_is_no_special_token_is_made_one(tmp_path: Path) -> None:
    made = byte_level(special=())
    made.add_tokens(["<eos>"])
    words = _opened(made, tmp_path)
    assert words.end_of_text == made.token_to_id("<eos>")
    assert words.end_of_text not in words.encode("a<eos>b")
    assert words.token_bytes[words.end_of_text] == 0


def test_an_ending_that_was_never_declared_is_no_piece_of_texts(tmp_path: Path) -> None:
    made = byte_level(["zz " * 9, "an "], special=())
    assert made.encode("zz").ids == [made.token_to_id("zz")]
    words = _opened(made, tmp_path, "zz")
    assert words.end_of_text == made.token_to_id("zz")
    assert words.decode(words.encode("zz a").tolist()) == "zz a"
    assert words.end_of_text not in words.encode("zz a")
    for piece in ("a", "\u0120"):
        with pytest.raises(EndOfTextError, match=r"is a piece of texts in .*; name a special token"):
            open_tokenizer(str(tmp_path), piece)


def test_what_is_not_for_a_corpus_is_left_out(tmp_path: Path) -> None:
    """Files of published models cut texts to their length and put tokens around them."""
    made = byte_level()
    plain = _opened(made, tmp_path / "plain")
    made.enable_truncation(4)
    made.enable_padding(length=4000)
    made.post_processor = processors.TemplateProcessing(
        single=f"{ENDING} $A {ENDING}", special_tokens=[(ENDING, made.token_to_id(ENDING))]
    )
    made.model.dropout = 0.5
    dressed = _opened(made, tmp_path / "dressed")
    assert "0.5" in (tmp_path / "dressed" / "tokenizer.json").read_text()
    for text in TEXTS:
        assert dressed.encode(text).tolist() == plain.encode(text).tolist()
    assert dressed.encode_batch(TEXTS)[0].tolist() == plain.encode(TEXTS[0]).tolist()
    assert dressed.fingerprint == plain.fingerprint


def test_bytes_that_are_no_utf8_are_replacement_characters(tmp_path: Path) -> None:
    words = _opened(byte_level(), tmp_path)
    text = b"caf\xe9 \xff\xfe".decode("utf-8", "surrogateescape")
    for tokens in (words.encode(text), words.encode_batch(["", text])[1]):
        assert words.decode(tokens.tolist()) == "caf\ufffd \ufffd\ufffd"


def test_bytes_of_tokens_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    for number, made in enumerate((byte_level(), sentencepiece())):
        words = _opened(made, tmp_path / str(number))
        assert words.token_bytes.dtype == np.int32
        assert words.token_bytes.shape == (words.vocab,)
        assert words.token_bytes[words.end_of_text] == 0
        for text in TEXTS:
            assert words.token_bytes[words.encode(text)].sum() == len(text.encode())


def test_the_fingerprint_is_of_what_it_does_and_not_of_how_it_is_written(tmp_path: Path) -> None:
    made = byte_level(special=(ENDING, "<other>"))
    words = _opened(made, tmp_path / "one")
    file = tmp_path / "one" / "tokenizer.json"
    written = json.loads(file.read_text())
    written["model"]["merges"] = [" ".join(pair) for pair in written["model"]["merges"]]  # as once
    again = tmp_path / "again.json"
    again.write_text(json.dumps(dict(reversed(written.items())), indent=4))
    assert open_tokenizer(str(again)).fingerprint == words.fingerprint
    assert open_tokenizer(str(again), "<other>").fingerprint == words.fingerprint  # of texts, the same
    assert _opened(byte_level(vocab=301), tmp_path / "two").fingerprint != words.fingerprint
    one, other = dict(written), dict(written)
    one["model"], other["model"] = written["model"] | {"unk_id": 0}, written["model"] | {"unk_id": None}
    assert _fingerprint(one) != _fingerprint(other) == words.fingerprint


def test_files_say_which_token_ends_a_document(tmp_path: Path) -> None:
    made = byte_level(special=("a1", "a2", "a3", "a4"))

    def ending(folder: str, **files: Any) -> str | None:
        return made.id_to_token(_opened(made, tmp_path / folder, **files).end_of_text)

    assert ending("b", tokenizer_config={"eos_token": "a2"}, config={"eos_token_id": 2}) == "a2"
    assert ending("c", tokenizer_config={}, special_tokens_map={"eos_token": {"content": "a3"}}) == "a3"
    assert ending("d", config={"eos_token_id": 3}) == "a4"
    assert ending("e", config={"eos_token_id": [1, 3]}) == "a2"
    file = tmp_path / "e" / "tokenizer.json"
    assert made.id_to_token(open_tokenizer(str(file)).end_of_text) == "a2"  # its neighbours are asked
    assert made.id_to_token(open_tokenizer(str(file), "a4").end_of_text) == "a4"
    assert made.id_to_token(open_tokenizer(str(file), 0).end_of_text) == "a1"
    number = next(number for number in range(260, 300) if str(made.id_to_token(number)).isascii())
    assert open_tokenizer(str(file), str(number)).end_of_text == number
    lone = file.rename(tmp_path / "lone.json")
    with pytest.raises(EndOfTextError, match=r"nothing beside .*lone.json says .* none of <\|endoftext\|>"):
        open_tokenizer(str(lone))
    with pytest.raises(EndOfTextError, match=r"lone.json has no token '<eos>'"):
        open_tokenizer(str(lone), "<eos>")
    with pytest.raises(EndOfTextError, match=r"has no token number 400; the last one is 299"):
        open_tokenizer(str(lone), 400)


def test_gpt2s_two_files_are_its_tokenizer_json(tmp_path: Path) -> None:
    made = byte_level()
    words = _opened(made, tmp_path / "one")
    two = tmp_path / "two"
    two.mkdir()
    made.model.save(str(two))
    found = open_tokenizer(str(two))
    assert sorted(path.name for path in two.iterdir()) == ["merges.txt", "vocab.json"]
    assert (found.vocab, found.end_of_text) == (words.vocab, words.end_of_text)
    assert found.fingerprint == words.fingerprint
    for text in TEXTS:
        assert found.encode(text).tolist() == words.encode(text).tolist()
    (two / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"two has no tokenizer.json, and no vocab.json with merges.txt"):
        open_tokenizer(str(two))


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for text, said in (
        ("{", "is not JSON: "),
        ("[]", "has no `model`"),
        ('{"model": {"type": "Magic"}}', "is not a tokenizer that this version of `tokenizers` reads: "),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "has an empty vocabulary"),
    ):
        file.write_text(text)
        with pytest.raises(DataError) as error:
            open_tokenizer(str(file))
        assert str(file) in str(error.value)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_a_configuration_takes_the_vocabulary_and_refuses_a_smaller_one(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    assert transformer_config(load_config(None, [f"data.tokenizer={folder}"])).vocab == 300
    assert transformer_config(load_config(None, [f"data.tokenizer={folder}", "model.vocab=304"])).vocab == 304
    with pytest.raises(
        ConfigError, match=rf"`model.vocab: 299` is less than {folder}'s 300 tokens; use model.vocab=auto"
    ):
        load_config(None, [f"data.tokenizer={folder}", "model.vocab=299"])
    with pytest.raises(ConfigError, match=r"command line: data.tokenizer: there is no tokenizer gone"):
        load_config(None, ["data.tokenizer=gone"])
    with pytest.raises(ConfigError, match=r"command line: data.end_of_text: .* has no token number 300"):
        load_config(None, [f"data.tokenizer={folder}", "data.end_of_text=300"])


def test_a_checkpoint_goes_on_with_the_same_tokens_wherever_their_file_lies(tmp_path: Path) -> None:
    here, there = saved(byte_level(), tmp_path / "here"), saved(byte_level(), tmp_path / "there")
    first, moved = (load_config(None, [f"data.tokenizer={folder}"]) for folder in (here, there))
    words = open_tokenizer(str(here))

    def values(fingerprint: str) -> RunValues:
        data = {"fingerprint": "f", "tokenizer": fingerprint}
        return RunValues(step=1, samples=1, data=data, layout={}, config=plain_settings(first), versions={})

    assert row_of("data.tokenizer").kind is Kind.FREE
    assert changes_since(moved, tmp_path / "step-00000001", values(words.fingerprint)) == []
    assert (
        changes_since(moved, tmp_path / "step-00000000", values("")) == []
    )  # an import, which has read no text
    with pytest.raises(ConfigError, match=rf"`data.tokenizer: .*` makes other tokens than {here} there"):
        changes_since(moved, tmp_path / "step-00000001", values("another"))
