"""Who is told that a model's tokens are not bytes."""

from __future__ import annotations

from pathlib import Path

from shardweave.launcher.foreign_tokens import foreign_tokens
from shardweave.launcher.reading import load_config


def test_a_tokenizer_or_another_vocabulary_beside_first_weights_is_told(tmp_path: Path) -> None:
    weights, run = tmp_path / "weights", tmp_path / "run"
    weights.mkdir()
    own = load_config(None, ["model.vocab=1000"])
    assert foreign_tokens(own, run) is None  # drawn at random, on bytes from the start
    (run / "huggingface").mkdir(parents=True)
    assert foreign_tokens(own, run) is None
    (run / "huggingface" / "tokenizer.json").touch()
    assert "of their own, in" in (foreign_tokens(own, run) or "")

    run = tmp_path / "another"
    bytes_again = load_config(None, [f"model.weights={weights}", "model.vocab=256"])
    assert foreign_tokens(bytes_again, run) is None  # exported after training on bytes
    text = foreign_tokens(load_config(None, [f"model.weights={weights}", "model.vocab=1000"]), run)
    assert text is not None
    assert "vocabulary of 1000" in text
    (weights / "vocab.json").touch()
    assert f"in {weights}" in (foreign_tokens(bytes_again, run) or "")
