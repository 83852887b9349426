"""A transformer written plainly, on a dict of full weights by canonical name, to compare the package with.

It shares no code with the package: attention is a loop over heads, norms are spelled out, and the batch comes
first. Weights are those of ``Transformer.state_dict()`` in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from shardweave import comm
from shardweave.models import Part, Transformer, TransformerConfig
from shardweave.models.recompute import RecomputeValue
from shardweave.tensor_parallel import Overlap, RotaryScaling

__all__ = [
    "FAMILIES",
    "MIXTURES",
    "batch_of",
    "build",
    "reference_logits",
    "reference_loss",
    "reference_mean_loss",
]

_SMALL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 11, "sequence": 8}

FAMILIES: dict[str, TransformerConfig] = {
    "gpt2": TransformerConfig(**_SMALL, position="learned", activation="gelu_tanh"),
    "bloom": TransformerConfig(**_SMALL, position="alibi", embedding_norm=True, activation="gelu"),
    "llama": TransformerConfig(
        **_SMALL, kv_heads=2, position="rotary", norm="rmsnorm", activation="swiglu", tie_embeddings=False
    ),
    "mixed": TransformerConfig(
        **_SMALL, kv_heads=1, ffn=13, position="learned", embedding_norm=True, norm="rmsnorm",
        activation="swiglu", bias=True, head_dim=6, qk_norm=True,
    ),
    "plain": TransformerConfig(
        **_SMALL, position="rotary", activation="gelu", bias=False, tie_embeddings=False, rotary_base=100.0,
        qk_norm=True,
    ),
    "parallel": TransformerConfig(
        **_SMALL, kv_heads=1, position="rotary", rotary_fraction=0.5, embedding_norm=True, parallel_residual=True,
        activation="relu", attention_bias=True, mlp_bias=False, qk_norm=True, tie_embeddings=False,
        rotary_scaling=RotaryScaling(kind="llama3", factor=8.0, original=6),
    ),
}  # fmt: skip
"""A small covering set: every value of every option occurs, with each kind of norm, head and position."""


MIXTURES: dict[str, TransformerConfig] = {
    "mixtral": replace(FAMILIES["llama"], ffn=13, experts=4, router_z_loss=0.02, balance_loss=0.3),
    "switch": replace(
        FAMILIES["gpt2"], experts=4, experts_per_token=1, expert_capacity=0.75, router_z_loss=0.05, balance_loss=0.2
    ),
    "three": replace(FAMILIES["plain"], ffn=7, experts=8, experts_per_token=3, router_bias=True, balance_loss=0.1),
}  # fmt: skip
"""Gated and not, one choice and several, with room for all and not."""


def batch_of(config: TransformerConfig, sequence: int = 8, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[b, s]``, two of the targets ignored."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(config.vocab, (batch, sequence + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[0, 2:4] = -100
    return text[:, :-1], targets


def build(
    config: TransformerConfig,
    *,
    tensor: comm.Axis | None = None,
    sequence_parallel: bool = False,
    keep_inputs: bool = False,
    decomposed: bool | Overlap = False,
    context: comm.Axis | None = None,
    context_form: Literal["ring", "all-to-all"] = "ring",
    expert: comm.Axis | None = None,
    expert_data: comm.Axis | None = None,
    chunked_loss: bool = False,
    recompute: RecomputeValue = "none",
    part: Part | None = None,
) -> Transformer:
    """A float64 model whose every parameter is moved off its initial value, so that biases and norms count."""
    model = Transformer(
        config,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        keep_inputs=keep_inputs,
        decomposed=decomposed,
        context=context,
        context_form=context_form,
        expert=expert,
        expert_data=expert_data,
        chunked_loss=chunked_loss,
        recompute=recompute,
        part=part,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            record = comm.sharding_of(parameter)
            noise = torch.randn(
                record.shape, generator=comm.named_generator(9, record.name), dtype=torch.float64
            )
            parameter.add_(noise[comm.full_index(parameter)], alpha=0.2)
    return model


def reference_logits(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    auxiliary: list[Tensor] | None = None,
) -> Tensor:
    """Logits ``[b, s, vocab]`` of ``tokens`` ``[b, s]``; each layer's losses of experts are put into ``auxiliary``."""
    x = weights["embedding.weight"][tokens]
    if config.position == "learned":
        x = x + weights["position.weight"][: tokens.shape[1]]
    if config.embedding_norm:
        x = _norm(config, weights, "embedding_norm", x)
    for layer in range(config.layers):
        name = f"layers.{layer}"
        before = x
        normed = _norm(config, weights, f"{name}.attention_norm", x)
        x = x + _attention(config, weights, f"{name}.attention", normed)
        normed = _norm(config, weights, f"{name}.mlp_norm", before if config.parallel_residual else x)
        if config.experts:
            y, losses = _mixture(config, weights, f"{name}.mlp", normed)
            x = x + y
            if auxiliary is not None:
                auxiliary.append(losses)
        else:
            x = x + _mlp(config, weights, f"{name}.mlp", normed)
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    return _norm(config, weights, "norm", x) @ head.T


def reference_loss(
    config: TransformerConfig, weights: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> Tensor:
    """The sum over the tokens whose target is not -100."""
    return _sum_of_tokens(reference_logits(config, weights, tokens), targets)


def reference_mean_loss(
    config: TransformerConfig, weights: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean over the tokens with a target, and what a mixture of experts adds to it."""
    auxiliary: list[Tensor] = []
    logits = reference_logits(config, weights, tokens, auxiliary)
    return _sum_of_tokens(logits, targets) / (targets != -100).sum(), torch.stack(auxiliary).sum()


def _sum_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    total = logits.new_zeros(())
    for row, target in zip(logits.flatten(0, 1), targets.flatten().tolist(), strict=True):
        if target != -100:
            total = total + torch.logsumexp(row, 0) - row[target]
    return total


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(config: TransformerConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    scaled = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weights[f"{name}.weight"]
    return scaled + weights[f"{name}.bias"] if config.norm == "layernorm" else scaled


def _attention(config: TransformerConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    size, length = config.head_size, x.shape[1]
    query, key, value = (_linear(weights, f"{name}.{role}", x) for role in ("query", "key", "value"))
    outputs = []
    for head in range(config.heads):
        own = slice(head * size, (head + 1) * size)
        shared = head * config.num_kv_heads // config.heads
        other = slice(shared * size, (shared + 1) * size)
        q, k, v = query[..., own], key[..., other], value[..., other]
        if config.qk_norm:
            q = _norm(config, weights, f"{name}.query_norm", q)
            k = _norm(config, weights, f"{name}.key_norm", k)
        if config.position == "rotary":
            q, k = _rotate(config, q), _rotate(config, k)
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        if config.position == "alibi":
            slope = 2.0 ** (-8.0 * (head + 1) / config.heads)  # the number of heads is a power of two here
            places = torch.arange(length)
            scores = scores - slope * (places[:, None] - places[None, :])
        future = torch.ones(length, length).triu(1).bool()
        outputs.append(torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v)
    return _linear(weights, f"{name}.output", torch.cat(outputs, -1))


def _rotate(config: TransformerConfig, x: Tensor) -> Tensor:
    """Pairs (i, i + d/2) as complex numbers, turned by position * speed, where d features of the head are turned."""
    half = int(config.head_size * config.rotary_fraction) // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    speed = torch.tensor([_speed(config, pair / half) for pair in range(half)], dtype=x.dtype)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * speed
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def _speed(config: TransformerConfig, place: float) -> float:
    """base^-place, and with Llama 3.1's scaling up to `factor` times less where the wave is long."""
    plain, scaling = float(config.rotary_base**-place), config.rotary_scaling
    if scaling is None:
        return plain
    assert scaling.kind == "llama3"
    assert scaling.original is not None
    wave = 2 * math.pi / plain
    if wave < scaling.original / scaling.high:
        return plain
    if wave > scaling.original / scaling.low:
        return plain / scaling.factor
    share = (scaling.original / wave - scaling.low) / (scaling.high - scaling.low)
    return (1 - share) * plain / scaling.factor + share * plain


def _mixture(
    config: TransformerConfig, weights: Mapping[str, Tensor], name: str, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: the output, and the layer's two losses with their coefficients, as means over ``x``."""
    batch, length, _ = x.shape
    experts, k = config.experts, config.experts_per_token
    room = (
        length if config.expert_capacity is None else math.ceil(config.expert_capacity * length * k / experts)
    )
    rows = []
    balance, z = x.new_zeros(()), x.new_zeros(())
    for row in x:
        taken, shares = [0] * experts, x.new_zeros(experts)
        for token in row:
            logits = weights[f"{name}.router.weight"] @ token
            probabilities = torch.exp(logits) / torch.exp(logits).sum()
            z = z + torch.log(torch.exp(logits).sum()) ** 2
            shares = shares + probabilities
            best = logits.detach().sort(descending=True, stable=True)[1][:k].tolist()
            whole = 1.0 if k == 1 else sum(probabilities[e] for e in best)
            y = torch.zeros_like(token)
            for e in best:
                taken[e] += 1
                if taken[e] <= room:
                    own = {
                        f"e.{role}.weight": weights[f"{name}.{role}.weight"][e]
                        for role in ("gate", "up", "down")
                        if f"{name}.{role}.weight" in weights
                    }
                    y = y + probabilities[e] / whole * _mlp(config, own, "e", token)
            rows.append(y)
        used = sum(share * number for share, number in zip(shares, taken, strict=True))
        balance = balance + used * experts / (k * length * length)
    losses = config.balance_loss * balance / batch + config.router_z_loss * z / (batch * length)
    return torch.stack(rows).view_as(x), losses


def _mlp(config: TransformerConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    up = _linear(weights, f"{name}.up", x)
    if config.activation == "swiglu":
        gate = _linear(weights, f"{name}.gate", x)
        inner = gate / (1 + torch.exp(-gate)) * up
    elif config.activation == "gelu":
        inner = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    elif config.activation == "relu":
        inner = torch.where(up > 0, up, 0)
    else:
        inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return _linear(weights, f"{name}.down", inner)
