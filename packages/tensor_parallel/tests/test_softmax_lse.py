"""One block of attention with its log-sum-exp: torch's private operator and the plain form, against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from packages.tensor_parallel.tests.reference import F64, assert_near, values
from torch import Tensor

from shardweave.tensor_parallel import softmax_lse
from shardweave.tensor_parallel.softmax_lse import Bias, attend, attend_backward, merge, private_operator


@pytest.fixture(params=["operator", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms, whatever this torch offers."""
    if request.param == "plain":
        monkeypatch.setattr(softmax_lse, "private_operator", lambda device, dtype: None)
    else:
        assert private_operator("cpu", F64) is not None
    return str(request.param)


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if bias.mask is not None:
        scores = scores + bias.mask
    weights = scores.softmax(-1)
    if bias.factor is not None:
        weights = weights * bias.factor
    return weights @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def kinds(queries: int, keys: int) -> list[Bias]:
    hidden = values(2, 1, queries, keys, seed=4).masked_fill(
        values(2, 1, queries, keys, seed=5) > 1, -math.inf
    )
    each_head = values(1, 4, queries, keys, seed=6)
    found = [Bias(), Bias(mask=hidden), Bias(mask=each_head), Bias(factor=values(2, 4, queries, keys).abs())]
    return [*found, Bias(causal=True)] if queries == keys else found


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_autograd(form: str, kv_heads: int) -> None:
    for queries, keys in ((6, 6), (3, 7), (5, 1)):
        for bias in kinds(queries, keys):
            q = values(2, 4, queries, 3).requires_grad_()
            k = values(2, kv_heads, keys, 3, seed=2).requires_grad_()
            v = values(2, kv_heads, keys, 3, seed=3).requires_grad_()
            out, lse = attend(q.detach(), k.detach(), v.detach(), bias)
            expected, expected_lse = written_out(q, k, v, bias)
            seen = torch.isfinite(expected_lse)
            assert_near(out, expected.detach().where(seen.unsqueeze(-1), 0.0))
            assert_near(lse, expected_lse.detach())
            if not seen.all():
                continue  # autograd's own gradient is NaN there; see the next test
            grad = values(2, 4, queries, 3, seed=8)
            found = attend_backward(grad, q.detach(), k.detach(), v.detach(), out, lse, bias)
            for mine, theirs in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
                assert_near(mine, theirs)


def test_keys_in_two_blocks_one_of_which_hides_everything_from_a_query(form: str) -> None:
    q, k, v = (values(1, 2, 4, 3, seed=seed) for seed in (1, 2, 3))
    mask = torch.zeros(1, 1, 4, 4, dtype=F64)
    mask[..., 1, :2] = -math.inf  # query 1 sees nothing of the first block, query 2 nothing of the second
    mask[..., 2, 2:] = -math.inf
    whole = Bias(mask=mask)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = written_out(leaves[0], leaves[1], leaves[2], whole)
    halves = [(k[:, :, part], v[:, :, part], Bias(mask=mask[..., part])) for part in (slice(2), slice(2, 4))]
    (out, lse), (other, other_lse) = (attend(q, *half) for half in halves)
    assert (lse[:, :, 1] == -math.inf).all()
    assert (out[:, :, 1] == 0).all()
    out, lse = merge(out, lse, other, other_lse)
    assert_near(out, expected.detach())
    assert_near(lse, expected_lse.detach())
    grad = values(1, 2, 4, 3, seed=8)
    parts = [attend_backward(grad, q, *half[:2], out, lse, half[2]) for half in halves]
    found = (parts[0][0] + parts[1][0], *(torch.cat([p[i] for p in parts], 2) for i in (1, 2)))
    for mine, theirs in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        assert_near(mine, theirs)


def test_a_query_that_sees_nothing_at_all_gives_zeros(form: str) -> None:
    q, k, v = (values(1, 1, 2, 3, seed=seed) for seed in (1, 2, 3))
    bias = Bias(mask=torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]], dtype=F64).view(1, 1, 2, 2))
    out, lse = merge(*attend(q, k, v, bias), *attend(q, k, v, bias))
    assert lse[0, 0, 1] == -math.inf
    assert (out[0, 0, 1] == 0).all()
    found = attend_backward(torch.ones_like(out), q, k, v, out, lse, bias)
    assert all(torch.isfinite(gradient).all() for gradient in found)
    assert (found[0][0, 0, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_and_the_sum_is_float32(form: str, dtype: torch.dtype) -> None:
    q, k, v = (values(2, 4, 16, 8, seed=seed) for seed in (1, 2, 3))
    grad = values(2, 4, 16, 8, seed=4)
    bias = Bias(causal=True)
    out, lse = attend(q, k, v, bias)
    exact = (out, lse, *attend_backward(grad, q, k, v, out, lse, bias))
    low_q, low_k, low_v, low_grad = (tensor.to(dtype) for tensor in (q, k, v, grad))
    out, lse = attend(low_q, low_k, low_v, bias)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    found = (out, lse, *attend_backward(low_grad, low_q, low_k, low_v, out, lse, bias))
    near = 1e-5 if dtype == torch.float32 else 0.05
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine.double() - theirs).abs().max() < near * theirs.abs().max()


def test_an_operator_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = softmax_lse._fused_forward

    def other_sum(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
        out, lse = right(q, k, v, bias)
        return out, lse / math.log(2.0)

    def gone(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
        raise AttributeError("no such operator")

    asked = private_operator.__wrapped__
    assert asked("cpu", torch.float32) is not None
    assert asked("cuda", torch.float32) is None
    for wrong in (other_sum, gone):
        monkeypatch.setattr(softmax_lse, "_fused_forward", wrong)
        assert asked("cpu", torch.float32) is None


def test_empty_sequences_have_empty_results() -> None:
    """The CPU's operator divides by their length, which ends the process."""
    for queries, keys in ((0, 3), (0, 0), (3, 0)):
        q, k = torch.zeros(2, 4, queries, 5), torch.zeros(2, 2, keys, 5)
        out, lse = attend(q, k, k, Bias(causal=False, mask=None))
        assert (out.shape, lse.shape) == (q.shape, (2, 4, queries))
        assert not out.any()
        gradients = attend_backward(torch.ones_like(q), q, k, k, out, lse, Bias(causal=False, mask=None))
        assert [one.shape for one in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("which", ["q", "k", "v", "grad"])
def test_heads_whose_numbers_lie_apart(form: str, which: str) -> None:
    """The fused operator goes by no last stride; two rotated numbers have another than 1, from `torch.cat`."""
    given = {name: values(1, 2, 6, 2, seed=seed) for seed, name in enumerate(("q", "k", "v", "grad"))}
    bias = Bias(causal=True)

    def found(**heads: Tensor) -> list[Tensor]:
        out, lse = attend(heads["q"], heads["k"], heads["v"], bias)
        backward = attend_backward(heads["grad"], heads["q"], heads["k"], heads["v"], out, lse, bias)
        return [out, lse, *backward]

    right = found(**given)
    apart = given[which].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert apart.stride(-1) != 1
    for ours, theirs in zip(found(**{**given, which: apart}), right, strict=True):
        assert_near(ours, theirs)
