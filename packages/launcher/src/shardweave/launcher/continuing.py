"""Texts continued by all ranks of a mesh together.

A token is one pass through the pipeline; texts are its micro-batches, so that with several of them the stages work at
once. The first tensor rank of the last stage picks, and tells all others::

    tokens ---> stage 0 ---> stage 1 ---> ... ---> logits of the last token, gathered over the tensor axis
       ^                                              |
       +------------------ broadcast <--------------- pick

Logits come to the CPU and are picked from there: an accelerator has other random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

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
) -> list[Tensor]:
    """Each of `texts` ``[b, s]`` int64 on the CPU, the same on all ranks, with `new` tokens behind; on all ranks.

    `modules`: this rank's stages, in evaluation, which `pipeline` runs. Every text is sampled with `seed` by itself,
    and so comes out as `shardweave.models.generate` has it, whatever the layout and the other texts.
    """
    config, device = modules[0].config, next(modules[0].parameters()).device
    windows = [TextWindow.of(modules, config, tokens, new, cache=cache) for tokens in texts]
    picker = pipeline.schedule.rank_of_stage[-1] * (mesh.model.size // mesh.pp.size)
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
        return [modules[-1].gather_logits(_tensor(output))[-1].cpu() for output in outputs]

    def share(picked: Tensor | None) -> Tensor:
        told = torch.zeros(rows, dtype=torch.int64) if picked is None else picked
        return comm.broadcast(told.to(device), mesh.model, picker).cpu()

    generators = [torch.Generator().manual_seed(seed) for _ in texts]
    with torch.no_grad():
        return continue_texts(
            step, texts, new, temperature=temperature, top_k=top_k, generators=generators, share=share
        )


def _tensor(output: object) -> Tensor:
    assert isinstance(output, Tensor)  # what a part with the head gives
    return output
