"""Continuing texts, one token after the other, on whatever ranks a model is spread over.

Two things are told apart, so that the loop knows nothing of ranks. A *step* gives the logits of the next token of each
text: a forward pass, in one process, over a tensor axis or through a pipeline. The loop picks a token from them and
tells it to all ranks (``share``)::

    texts --> TextWindow --> forward --> logits [b, vocab] --> pick --> share --> texts with one token more
              what is new                of the last token

Each text has its own source of random numbers, and a pick depends on logits and nothing else: a text does not depend on
the layout, nor on the others beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardweave import comm

from .cache import Cache, make_cache
from .config import TransformerConfig
from .transformer import Transformer

__all__ = ["TextWindow", "continue_text", "continue_texts", "generate"]

Step: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor] | None]
"""From texts ``[b, s]`` to the logits ``[b, vocab]`` of the token behind each; ``None`` on ranks without the head."""


@dataclass
class TextWindow:
    """Which tokens of a growing text a model is given next: with a cache what is new, else its last ``sequence``."""

    sequence: int
    """Tokens that the model reads at most."""

    cache: Cache | None
    """Of this rank's parts; ``None``: every token is a pass over all that the model reads."""

    read: int = 0
    """Tokens of the text that are in the cache, on every rank alike."""

    @classmethod
    def of(
        cls,
        modules: Iterable[nn.Module],
        config: TransformerConfig,
        tokens: Tensor,
        new: int,
        *,
        cache: bool = True,
    ) -> TextWindow:
        """For ``tokens`` ``[b, s]`` with ``new`` behind them; ``modules``: this rank's parts of the model.

        The cache has room for what of them comes before ``config.sequence``. None is made where it would serve nothing:
        for one new token, behind a text that is too long, and with an ``expert_capacity``, for which tokens of a
        sequence compete.
        """
        batch, given = tokens.shape
        serves = cache and new > 1 and given < config.sequence and config.expert_capacity is None
        length = min(given + new - 1, config.sequence)
        return cls(config.sequence, make_cache(modules, batch, length) if serves else None)

    def next(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """What of the text ``tokens`` ``[b, s]`` goes into the model's first part, and the keyword arguments with which
        every part is called."""
        length = tokens.shape[1]
        if self.cache is None or length > self.sequence:
            self.cache = None  # the window moves: every token has another position than it was kept with
            return tokens[:, -self.sequence :], {"last_only": True}
        start, self.read = self.read, length
        return tokens[:, start:], {"cache": self.cache, "last_only": True}


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    cache: bool = True,
    end: int | None = None,
) -> Tensor:
    """``tokens`` ``[b, s]`` with ``new`` sampled ones behind, ``[b, s + new]``, by a whole model in one process or one
    that is split over a tensor axis, all of whose ranks call it alike.

    ``temperature`` divides the logits; 0 takes the likeliest token each time. ``top_k`` samples among the k
    likeliest. ``generator`` is the only source of randomness; ``None`` uses one seeded with 0. The model
    reads at most its last ``config.sequence`` tokens. Its training mode is restored, and torch's default
    generator is left alone. Over ranks the first one's picks count. ``end``: see :func:`continue_texts`.

    ``cache``: whether keys and values are kept, :func:`.cache_bytes` of them; the text is the same without. Beyond
    ``config.sequence`` tokens the window moves, and each token is a pass over all that the model reads.

    Raises:
        ValueError: for a part of a model, a model that cuts sequences, an empty prompt, or settings out of range.
    """
    _check_model(model)
    window = TextWindow.of([model], model.config, *_checked(tokens, new), cache=cache)

    def step(text: Tensor) -> Tensor:
        given, arguments = window.next(text)
        return model.gather_logits(model(given, **arguments))[-1]

    def share(picked: Tensor | None) -> Tensor:
        assert picked is not None  # every rank has logits
        return comm.broadcast(picked, model.axis)

    training = model.training
    model.eval()
    try:
        return continue_text(
            step, tokens, new, temperature=temperature, top_k=top_k, generator=generator, share=share, end=end
        )
    finally:
        model.train(training)


def continue_text(
    step: Callable[[Tensor], Tensor | None],
    tokens: Tensor,
    new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    share: Callable[[Tensor | None], Tensor] | None = None,
    end: int | None = None,
) -> Tensor:
    """:func:`continue_texts` with one text: ``tokens`` ``[b, s]`` to ``[b, s + new]``."""

    def steps(texts: Sequence[Tensor]) -> Sequence[Tensor] | None:
        logits = step(texts[0])
        return None if logits is None else [logits]

    generators = None if generator is None else [generator]
    [found] = continue_texts(
        steps,
        [tokens],
        new,
        temperature=temperature,
        top_k=top_k,
        generators=generators,
        share=share,
        end=end,
    )
    return found


def continue_texts(
    step: Step,
    texts: Sequence[Tensor],
    new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generators: Sequence[torch.Generator] | None = None,
    share: Callable[[Tensor | None], Tensor] | None = None,
    end: int | None = None,
) -> list[Tensor]:
    """Each of ``texts`` ``[b, s]`` (of any ``b`` and ``s``) with ``new`` tokens behind, ``[b, s + new]``.

    ``step``: called with all texts so far, ``new`` times; see :data:`Step`. What it computes the logits from is its
    own: it may give a model the new tokens alone and keep the rest (:class:`TextWindow`). ``generators``: one for each
    text; ``None``: each has one seeded with 0. ``share``: where several ranks go on together, gets the tokens that
    were picked here, int64 ``[rows of all texts]``, or ``None`` where ``step`` gave no logits, and returns those that
    all ranks go on with. ``end``: the token at which a text ends. Behind its first new one a row has nothing but that
    token, and when all rows of all texts have it, no more is sampled: fewer than ``new`` tokens may be added.

    Raises:
        ValueError: for settings out of range, an empty text, or no logits and nobody to ask for tokens.
    """
    if generators is not None and len(generators) != len(texts):
        raise ValueError(f"generators: {len(generators)} for {len(texts)} texts; give one for each")
    if temperature < 0:
        raise ValueError(f"temperature: {temperature} is negative; use 0 for the likeliest token, or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: {top_k} leaves nothing to choose from; use at least 1")
    texts = [_checked(tokens, new)[0] for tokens in texts]
    sources = generators or [torch.Generator(tokens.device).manual_seed(0) for tokens in texts]
    rows = [len(tokens) for tokens in texts]
    ended = torch.zeros(sum(rows), dtype=torch.bool)
    for _ in range(new):
        logits = step(texts)
        picked: Tensor | None = None
        if logits is not None:
            each = [
                _pick(own, temperature, top_k, source) for own, source in zip(logits, sources, strict=True)
            ]
            picked = torch.cat(each)
        if share is not None:
            picked = share(picked)
        if picked is None:
            raise ValueError(
                "step: gave no logits and there is no share that would give tokens; pass one of both"
            )
        if end is not None:
            picked = torch.where(ended.to(picked.device), end, picked)
            ended = picked == end
        texts = [
            torch.cat([tokens, own.unsqueeze(1)], 1)
            for tokens, own in zip(texts, picked.split(rows), strict=True)
        ]
        if end is not None and bool(ended.all()):
            break
    return list(texts)


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token for each row of ``logits`` ``[b, vocab]``: ``[b]``.

    Drawn in the order of the vocabulary. In that of the logits two of nearly the same size, which another layout
    rounds the other way, would change places, and with them the token.
    """
    if temperature == 0:
        return logits.argmax(-1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if top_k is not None and top_k < wide.shape[-1]:
        values, tokens = wide.topk(top_k)
        wide = torch.full_like(wide, -torch.inf).scatter(-1, tokens, values)
    probabilities = torch.softmax((wide - wide.amax(-1, keepdim=True)) / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def _check_model(model: Transformer) -> None:
    if not (model.part.embedding and model.part.head):
        raise ValueError(
            f"generate: the model is split, this is {model.part}; build it whole, or give continue_text a step that "
            "goes through all parts"
        )
    if model.cut.given is not None:
        raise ValueError(
            f"generate: the model is split with {model.cut.given}, which cuts sequences; build it without"
        )


def _checked(tokens: Tensor, new: int) -> tuple[Tensor, int]:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens: [b, s] with at least one token to continue, not {tuple(tokens.shape)}")
    if new < 0:
        raise ValueError(f"new: {new} tokens cannot be sampled; use 0 or more")
    return tokens, new
