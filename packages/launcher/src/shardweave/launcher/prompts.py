"""From the text of a prompt to tokens that a model continues, and from what it made of them to text again."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["prompt_tokens", "text_of"]


def prompt_tokens(words: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt; of none the end-of-text token, behind which a document begins."""
    tokens: list[int] = words.encode(prompt).tolist()
    return tokens or [words.end_of_text]


def text_of(words: Tokenizer, prompt: str, tokens: Sequence[int], *, ignore_end: bool = False) -> str:
    """The prompt as it was given and the text of what was sampled behind it, up to where it ends.

    `tokens`: of both. Tokens are read together with the prompt's, since how a token is written may depend on what comes
    before it. `ignore_end`: the text goes on behind the end-of-text token, which is a blank line.
    """
    given = prompt_tokens(words, prompt)
    new = list(tokens[len(given) :])
    if not ignore_end and words.end_of_text in new:
        new = new[: new.index(words.end_of_text)]
    whole, start = words.decode([*given, *new]), words.decode(given)
    plain = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # can be written
    return plain + (whole.removeprefix(start) if whole.startswith(start) else words.decode(new))
