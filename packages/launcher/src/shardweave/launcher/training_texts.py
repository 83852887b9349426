"""Samples of text while a model is trained: what it makes of a prompt, every so many steps.

All ranks make the text together, as they train. Nothing of the training is touched: picks have a source of random
numbers of their own, nothing is dropped and no gradient is computed, so a run with samples is the run without, to the
last bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardweave.launcher.continuing import continue_together
from shardweave.launcher.prompts import prompt_tokens, text_of
from shardweave.launcher.sampling import Sampling
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.words import tokenizer_of

__all__ = ["sampled_text", "shown"]

_LINES = 12


def sampled_text(trainer: Trainer) -> str:
    """`run.sample_prompt` and up to `run.sample_tokens` tokens behind it, by the model as it is now; the same on every
    rank, all of which call it.

    As ``generate`` picks them by default, with the same random numbers each time.

    Raises:
        ConfigError: where the run's tokenizer cannot be opened.
    """
    settings, parts, words = trainer.config.run, trainer.parts, tokenizer_of(trainer.config)
    parts.train(False)
    [found] = continue_together(
        trainer.mesh,
        parts.modules,
        parts.pipeline,
        [torch.tensor([prompt_tokens(words, settings.sample_prompt)], dtype=torch.int64)],
        settings.sample_tokens,
        temperature=Sampling.temperature,
        seed=Sampling.seed,
        end=words.end_of_text,
    )
    parts.train()
    return text_of(words, settings.sample_prompt, found[0].tolist())


def shown(step: int, text: str, place: str) -> Iterator[str]:
    """The lines in which a person sees a text; what is not printable is a replacement character. `place`: where the
    whole text is, if it is long."""
    yield f"text at step {step}:"
    lines = text.expandtabs(4).splitlines()
    for line in lines[:_LINES]:
        yield "  | " + "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
    if len(lines) > _LINES:
        yield f"  | ... ({len(lines) - _LINES} more lines in {place})"
