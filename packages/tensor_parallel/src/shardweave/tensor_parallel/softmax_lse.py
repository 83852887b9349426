"""Attention of some queries to some keys, with each query's log-sum-exp, forward and backward.

Results for two sets of keys can be merged into that for both, when each comes with the logarithm of the sum that its
softmax divided by::

    out = sum over the sets of exp(lse_set - lse) out_set          lse = log of the sum of exp(lse_set)

torch's fused attention computes that number and does not return it; only operators with a leading underscore do. They
may change with any release, so this file is the only one that calls them, after :func:`private_operator` has compared
them with the plain form on small inputs: by what they answer and not by torch's version. Where there is none, or it
answers otherwise, the plain form does it all; it holds the scores of one block, ``[b, n, q, k]``.

[Note: A query that sees nothing]
    A block may hide all of its keys from a query, by documents. Its sum is empty: ``out`` is 0 and ``lse`` minus
    infinity, so that it counts for nothing in the merge. The fused operator answers ``lse`` 0 there, which would
    count for as much as a key of score 0, and is corrected. In the plain form minus infinity minus minus infinity is
    NaN, so the maximum that is subtracted is a finite number.

[Note: Grouped queries]
    ``k`` and ``v`` may have fewer heads, ``m``, than ``q`` has, ``n``: query head ``i`` reads head ``i // (n / m)``.
    Their gradients are sums over the group.

[Note: A head's numbers lie together]
    The fused operators read a head's ``d`` numbers one after the other, whatever the last stride says; torch's public
    attention looks first, they do not, and read beside the tensor. Rotated heads of two numbers have another stride:
    halves of one number look to ``torch.cat`` like images with the channels last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Bias", "attend", "attend_backward", "merge", "private_operator"]

Forward = Callable[[Tensor, Tensor, Tensor, "Bias"], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "Bias"], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Bias:
    """What a block's scores and weights are changed by."""

    causal: bool = False
    """Whether query ``i`` sees keys ``0 .. i`` only; in a block with as many queries as keys, and without a mask."""

    mask: Tensor | None = None
    """Added to the scores, in their dtype, minus infinity where a key is hidden; broadcasts to ``[b, n, q, k]``."""

    factor: Tensor | None = None
    """What weights are multiplied by after the softmax (dropout), ``[b, n, q, k]``; needs the plain form."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
    """``softmax(q k^T / sqrt(d) + mask) v``, and the logarithm of the sum that the softmax divides by.

    ``q`` ``[b, n, q, d]``; ``k`` and ``v`` ``[b, m, k, d]``, see [Note: Grouped queries]. Returns ``[b, n, q, d]`` in
    the dtype of ``q``, and ``[b, n, q]`` in float32 or wider, minus infinity where a query sees nothing.
    """
    operator = _operator_for(q, k, bias)
    return (_plain_forward if operator is None else operator[0])(q, k, v, bias)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Bias
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of the gradients of ``q``, ``k`` and ``v`` that come from this block, in their shapes.

    ``out`` and ``lse`` are those of all keys, merged, and ``grad`` is the gradient of ``out``: each block's weights
    are ``exp(score - lse)`` (Dao, arXiv:2307.08691, section 3.1.2).
    """
    operator = _operator_for(q, k, bias)
    return (_plain_backward if operator is None else operator[1])(grad, q, k, v, out, lse, bias)


def _operator_for(q: Tensor, k: Tensor, bias: Bias) -> tuple[Forward, Backward] | None:
    """None: the plain form has to do it. An empty sequence ends the process in the CPU's operator (a division)."""
    if bias.factor is not None or not q.numel() or not k.numel():
        return None
    return private_operator(q.device.type, q.dtype)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result for two sets of keys from those for each; new tensors, in the dtype of ``lse``."""
    both = torch.logaddexp(lse, other_lse)
    base = both.masked_fill(both == -math.inf, 0.0)
    left, right = (lse - base).exp().unsqueeze(-1), (other_lse - base).exp().unsqueeze(-1)
    return out * left + other * right, both


@lru_cache(maxsize=32)
def private_operator(device: str, dtype: torch.dtype) -> tuple[Forward, Backward] | None:
    """torch's own forward and backward for a kind of device and a dtype, where there are any and they do as expected.

    Asked by a call: names, arguments and results are what they were, or the plain form takes over. Only the CPU's are
    known here; on other devices it is the plain form.
    """
    if device != "cpu":
        return None
    try:
        agrees = all(
            _agrees(dtype, *trial) for trial in ((2, False, False), (1, True, False), (2, False, True))
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return (_fused_forward, _fused_backward) if agrees else None


def _agrees(dtype: torch.dtype, group: int, causal: bool, masked: bool) -> bool:
    """Whether fused and plain form give the same, forward and backward, on a few numbers."""
    numbers = torch.linspace(-1.0, 1.0, 2 * group * 3 * 4, dtype=torch.float64).sin().mul(3).to(dtype)
    q = numbers.view(1, 2 * group, 3, 4)
    k, v, grad = q.flip(-1)[:, :2].contiguous(), q.flip(-2)[:, :2].contiguous(), q.flip(1).contiguous()
    mask = numbers[:9].view(1, 1, 3, 3).clone() if masked else None
    if mask is not None:
        mask[0, 0, 1, :] = -math.inf
        mask[0, 0, 2, 0] = -math.inf
    bias = Bias(causal=causal, mask=mask)
    out, lse = _plain_forward(q, k, v, bias)
    expected = (out, lse, *_plain_backward(grad, q, k, v, out, lse, bias))
    fused = _fused_forward(q, k, v, bias)
    found = (*fused, *_fused_backward(grad, q, k, v, out, lse, bias))
    near = 1e-9 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 0.1
    return all(
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.allclose(left, right, rtol=near, atol=near)
        for left, right in zip(found, expected, strict=True)
    )


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = _together(q), _together(k), _together(v)  # see [Note: A head's numbers lie together]
    out, lse = operator(q, k, v, 0.0, bias.causal, attn_mask=bias.mask)
    if bias.mask is not None:  # see [Note: A query that sees nothing]
        blind = (bias.mask == -math.inf).all(-1)
        lse = lse.masked_fill(blind, -math.inf)
    return out, lse


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Bias
) -> tuple[Tensor, Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    grad, q, k, v, out = (_together(tensor) for tensor in (grad, q, k, v, out.to(q.dtype)))
    dq, dk, dv = operator(grad, q, k, v, out, finite, 0.0, bias.causal, attn_mask=bias.mask)
    return dq, dk, dv


def _together(heads: Tensor) -> Tensor:
    """The same with a last stride of 1; a copy only where it has another."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias)  # [b, m, n / m, q, k]
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    if bias.factor is not None:
        weights = weights * _grouped(bias.factor, k)
    out = weights.to(v.dtype) @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Bias
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, bias)
    wide = scores.dtype
    total = _grouped(lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1), k)
    weights = (scores - total).exp()
    upward = _grouped(grad, k)
    factor = None if bias.factor is None else _grouped(bias.factor, k)
    used = weights if factor is None else weights * factor
    dv = used.to(v.dtype).transpose(-1, -2) @ upward
    d_weights = (upward @ v.unsqueeze(2).transpose(-1, -2)).to(wide)
    if factor is not None:
        d_weights = d_weights * factor
    along = _grouped((grad.to(wide) * out.to(wide)).sum(-1, keepdim=True), k)
    d_scores = (weights * (d_weights - along) / math.sqrt(q.shape[-1])).to(q.dtype)
    dq = d_scores @ k.unsqueeze(2)
    dk = d_scores.transpose(-1, -2) @ _grouped(q, k)
    return dq.flatten(1, 2), dk.sum(2), dv.sum(2)


def _scores(q: Tensor, k: Tensor, bias: Bias) -> Tensor:
    """The scores with what is added to them, ``[b, m, n / m, q, k]`` in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_grouped(q, k) @ k.unsqueeze(2).transpose(-1, -2)).to(wide) / math.sqrt(q.shape[-1])
    if bias.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if bias.mask is not None:
        scores = scores + _grouped(bias.mask.expand(-1, q.shape[1], -1, -1), k)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """``[b, n, ...]`` to ``[b, m, n / m, ...]`` for the heads of ``k`` ``[b, m, ...]``."""
    grouped: Tensor = x.unflatten(1, (k.shape[1], -1))
    return grouped
