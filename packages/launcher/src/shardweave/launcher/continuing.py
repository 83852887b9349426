"""Texts continued by all ranks of a mesh together.

A token is one pass through the pipeline; texts are its micro-batches, so that with several of them the stages work at
once. The first tensor rank of the last stage picks, and tells all others, of every replica::

    tokens ---> stage 0 ---> stage 1 ---> ... ---> logits of the last token, gathered over the tensor axis
       ^                                              |
       +------------------ broadcast <--------------- pick

Logits come to the CPU and are picked from there: an accelerator has other random numbers.

Where sequences are cut over ranks, as most are while a model is trained, a single token cannot be; then each token is
a pass over the whole text, made longer behind its end until the ranks have equal parts. No token sees what comes after
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Mesh
from shardweave.models import TextWindow, Transformer, continue_texts
from shardweave.pipeline import Pipeline

__all__ = ["continue_together"]


def continue_together(
    mesh: Mesh,
    modules: Sequence[Transformer],
    pipeline: Pipeline,
    texts: Sequence[Tensor],
    new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
    end: int | None = None,
) -> list[Tensor]:
    """Each of `texts` ``[b, s]`` int64 on the CPU, the same on all ranks, with `new` tokens behind; on all ranks.

    `modules`: this rank's stages, in evaluation, which `pipeline` runs. Every text is sampled with `seed` by itself,
    and so comes out as `shardweave.models.generate` has it, whatever the layout and the other texts. `end`: the token
    at which a text ends, see `shardweave.models.continue_texts`.

    With an expert capacity, for which the tokens of a sequence compete, the text is another where sequences are cut.
    """
    config, device = modules[0].config, next(modules[0].parameters()).device
    cut = modules[0].cut  # of all stages of all ranks
    windows = [
        TextWindow.of(modules, config, tokens, new, cache=cache)
        if cut.given is None
        else _WholeWindow(config.sequence, cut.multiple)
        for tokens in texts
    ]
    picker = pipeline.schedule.rank_of_stage[-1] * (mesh.world.size // mesh.pp.size)  # of the first replica
    rows = sum(len(tokens) for tokens in texts)

    def step(texts: Sequence[Tensor]) -> list[Tensor] | None:
        given = [window.next(tokens) for window, tokens in zip(windows, texts, strict=True)]
        outputs = pipeline.predict(
            [tokens.to(device) for tokens, _ in given],
            arguments=[arguments for _, arguments in given],
            micro_batches=len(given),
        )
        if outputs is None:
            return None
        # The last stage is the last one of its rank.
        return [
            modules[-1].gather_logits(_tensor(output), _last(window))[-1].cpu()
            for window, output in zip(windows, outputs, strict=True)
        ]

    def share(picked: Tensor | None) -> Tensor:
        told = torch.zeros(rows, dtype=torch.int64) if picked is None else picked
        return comm.broadcast(told.to(device), mesh.world, picker).cpu()

    generators = [torch.Generator().manual_seed(seed) for _ in texts]
    with torch.no_grad():
        return continue_texts(
            step,
            texts,
            new,
            temperature=temperature,
            top_k=top_k,
            generators=generators,
            share=share,
            end=end,
        )


@dataclass
class _WholeWindow:
    """Which tokens a model that cuts sequences is given: all that it reads, and some behind them."""

    sequence: int
    """Tokens that the model reads at most."""
    multiple: int
    """Of which lengths have to be a multiple; `sequence` is one."""
    last: int = 0
    """Where in what was given last the text ends."""

    def next(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """As `TextWindow.next`. Few lengths, since what is compiled is compiled for each: each is twice another."""
        read = tokens[:, -self.sequence :]
        self.last = read.shape[1] - 1
        length = self.multiple
        while length < read.shape[1]:
            length *= 2
        length = min(length, self.sequence)
        return torch.nn.functional.pad(read, (0, length - read.shape[1])), {}


def _last(window: TextWindow | _WholeWindow) -> int | None:
    """Which of the logits are wanted; None: there are no others."""
    return window.last if isinstance(window, _WholeWindow) else None


def _tensor(output: object) -> Tensor:
    assert isinstance(output, Tensor)  # what a part with the head gives
    return output
