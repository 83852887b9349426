"""How models of transformers are cut: GPT-2 and Llama for causal language modelling.

They are also the examples to follow for another model. A piece is a tuple of names of submodules and a function that
gets these submodules, then what the piece before returned, then keywords. transformers is not imported: the names
say all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["PUBLIC"]

Parts: TypeAlias = list[tuple[tuple[str, ...], Callable[..., Any]]]


def _gpt2(model: Any) -> Parts:
    _check(model)
    if model.config.add_cross_attention:
        raise ValueError(
            "a GPT-2 with add_cross_attention=True takes a second input; write its pieces by hand"
        )
    layers = range(model.config.n_layer)
    return [
        (("transformer.wte", "transformer.wpe", "transformer.drop"), _gpt2_embed),
        *(((f"transformer.h.{layer}",), _gpt2_block) for layer in layers),
        (("transformer.ln_f", "lm_head"), _head),
    ]


def _gpt2_embed(
    wte: nn.Module, wpe: nn.Module, drop: nn.Module, input_ids: Tensor, *, position_ids: Tensor | None = None
) -> Tensor:
    if position_ids is None:
        position_ids = _positions(input_ids)
    embedded: Tensor = drop(wte(input_ids) + wpe(position_ids))
    return embedded


def _gpt2_block(block: nn.Module, hidden: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
    return _first(block(hidden, attention_mask=attention_mask))


def _llama(model: Any) -> Parts:
    _check(model)
    layers = range(model.config.num_hidden_layers)
    return [
        (("model.embed_tokens",), _llama_embed),
        # Every layer computes the angles of its positions, which is less than sending them along.
        *(((f"model.layers.{layer}", "model.rotary_emb"), _llama_layer) for layer in layers),
        (("model.norm", "lm_head"), _head),
    ]


def _llama_embed(embed_tokens: nn.Module, input_ids: Tensor) -> Tensor:
    embedded: Tensor = embed_tokens(input_ids)
    return embedded


def _llama_layer(
    layer: nn.Module,
    rotary: nn.Module,
    hidden: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    if position_ids is None:
        position_ids = _positions(hidden)
    angles = rotary(hidden, position_ids=position_ids)
    return _first(
        layer(hidden, attention_mask=attention_mask, position_ids=position_ids, position_embeddings=angles)
    )


def _head(norm: nn.Module, head: nn.Module, hidden: Tensor) -> Tensor:
    logits: Tensor = head(norm(hidden))
    return logits


def _check(model: Any) -> None:
    """Refuses what the pieces would compute otherwise than the model."""
    kind = type(model).__name__
    if not hasattr(model, "lm_head"):
        raise ValueError(
            f"a {kind} has no lm_head; known are the pieces of models for causal language modelling"
        )
    attention = model.config._attn_implementation
    if attention != "sdpa":
        raise ValueError(
            f"a {kind} with attn_implementation={attention!r} gets its causal mask from the model, of which a stage "
            "has only a part; build it with attn_implementation='sdpa'"
        )


def _positions(x: Tensor) -> Tensor:
    """0, 1, 2 and so on along the sequence, for all samples."""
    return torch.arange(x.shape[1], device=x.device)[None]


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden states: some versions return them alone, some in a tuple."""
    return output[0] if isinstance(output, tuple) else output


PUBLIC: dict[str, Callable[[Any], Parts]] = {"gpt2": _gpt2, "llama": _llama}
"""By ``config.model_type``: submodules and functions of the pieces."""
