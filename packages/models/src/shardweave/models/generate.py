"""Continuing a text, one token after the other, in one process.

A helper to look at what a model has learned, not a server: nothing is cached, each token is one forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .transformer import Transformer

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``tokens`` ``[b, s]`` with ``new`` sampled ones behind, ``[b, s + new]``.

    ``temperature`` divides the logits; 0 takes the likeliest token each time. ``top_k`` samples among the k
    likeliest. ``generator`` is the only source of randomness; ``None`` uses one seeded with 0. The model
    reads at most its last ``config.sequence`` tokens. Its training mode is restored, and torch's default
    generator is left alone.

    Raises:
        ValueError: for a model that is not whole, an empty prompt, or settings out of range.
    """
    _check(model, tokens, new, temperature, top_k)
    source = generator if generator is not None else torch.Generator(tokens.device).manual_seed(0)
    training = model.training
    model.eval()
    try:
        for _ in range(new):
            output = model(tokens[:, -model.config.sequence :])
            logits = model.logits(output[-1:])[-1]  # of the last token: [1, b, vocab] -> [b, vocab]
            tokens = torch.cat([tokens, _pick(logits, temperature, top_k, source)], dim=1)
    finally:
        model.train(training)
    return tokens


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token for each row of ``logits`` ``[b, vocab]``: ``[b, 1]``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    values, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    wide = torch.promote_types(values.dtype, torch.float32)
    probabilities = torch.softmax(values.to(wide) / temperature, dim=-1)
    return tokens.gather(-1, torch.multinomial(probabilities, 1, generator=generator))


def _check(model: Transformer, tokens: Tensor, new: int, temperature: float, top_k: int | None) -> None:
    if not (model.part.embedding and model.part.head) or model.axis.size > 1 or model.context.size > 1:
        raise ValueError("generate: the model is split; build it whole in one process to sample from it")
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens: [b, s] with at least one token to continue, not {tuple(tokens.shape)}")
    if new < 0:
        raise ValueError(f"new: {new} tokens cannot be sampled; use 0 or more")
    if temperature < 0:
        raise ValueError(f"temperature: {temperature} is negative; use 0 for the likeliest token, or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: {top_k} leaves nothing to choose from; use at least 1")
