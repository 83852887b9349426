"""Rotary and ALiBi positions."""

from __future__ import annotations

import math

import pytest
import torch
from packages.tensor_parallel.tests.reference import F64, assert_near, values

from shardweave.comm import Axis
from shardweave.tensor_parallel import Alibi, ParallelAttention, Rotary, alibi_bias, alibi_slopes


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    rotary = Rotary(8, base=100.0)
    x = values(2, 5, 8)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.outer(torch.arange(5, dtype=F64), 100.0 ** (-torch.arange(4, dtype=F64) / 4))
    turned = pairs * torch.exp(1j * angles)
    assert_near(rotary(x), torch.cat((turned.real, turned.imag), dim=-1))


def test_scores_depend_on_distance_only() -> None:
    rotary = Rotary(6)
    query, key = values(1, 6).expand(4, 6), values(1, 6, seed=2).expand(4, 6)
    near = rotary(query) @ rotary(key).t()
    far = rotary(query, torch.arange(4) + 1000) @ rotary(key, torch.arange(4) + 1000).t()
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)
    assert_near(near.diagonal(1)[1:], near.diagonal(1)[:-1])


def test_a_part_of_the_sequence_is_turned_by_its_global_positions() -> None:
    rotary = Rotary(6)
    x = values(3, 8, 6)
    assert_near(rotary(x[:, 4:], torch.arange(4, 8)), rotary(x)[:, 4:])
    assert torch.equal(rotary(x[:, :4]), rotary(x)[:, :4])  # another length does not disturb the cache
    ranges = (range(1, 3), range(6, 8))
    assert torch.equal(rotary(x[:, :4], ranges), rotary(x[:, :4], torch.tensor([1, 2, 6, 7])))
    assert not torch.equal(rotary(x[:, :4], ranges), rotary(x[:, :4]))


def test_a_fraction_of_the_features() -> None:
    rotary, x = Rotary(8, fraction=0.25), values(5, 8)
    assert torch.equal(rotary(x)[:, 2:], x[:, 2:])
    assert_near(rotary(x)[:, :2], Rotary(2)(x[:, :2]))
    assert not list(rotary.parameters())
    assert not rotary.state_dict()
    with pytest.raises(ValueError, match="is 3, which must be even"):
        Rotary(6, fraction=0.5)


def test_low_precision_angles_are_computed_in_float32() -> None:
    x = values(1, 2048, 4)
    found = Rotary(4)(x.to(torch.bfloat16)).double()
    assert (found - Rotary(4)(x)).abs().max() < 0.05


def test_slopes_as_published_models_have_them() -> None:
    assert alibi_slopes(1) == (2.0**-8,)
    assert alibi_slopes(4) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert alibi_slopes(6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert alibi_slopes(8)[0] == 0.5
    assert len(alibi_slopes(112)) == 112  # BLOOM-176B
    assert math.isclose(alibi_slopes(112)[64], 2.0 ** (-8 / 128))
    with pytest.raises(ValueError, match="0 heads"):
        alibi_slopes(0)


def test_bias_is_zero_on_the_diagonal_and_linear_in_distance() -> None:
    bias = alibi_bias(torch.tensor([0.5, 0.25]), torch.arange(4))
    assert bias.shape == (2, 4, 4)
    assert bias[0, 3].tolist() == [-1.5, -1.0, -0.5, 0.0]
    assert bias[1, 3].tolist() == [-0.75, -0.5, -0.25, 0.0]


def test_a_mask_is_made_once_and_for_the_heads_at_hand() -> None:
    alibi = Alibi(6)
    query = values(2, 3, 4, 8)
    mask = alibi(query, 2, causal=True)
    assert mask.shape == (1, 3, 4, 4)
    assert mask is alibi(query, 2, causal=True)
    expected = alibi_bias(torch.tensor(alibi_slopes(6)[2:5], dtype=F64), torch.arange(4))
    assert_near(mask[0].tril(), expected.tril())
    assert (mask[0][:, torch.ones(4, 4).triu(1).bool()] == -math.inf).all()
    assert torch.equal(alibi(query, 2, causal=False)[0], expected)
    assert not list(alibi.parameters())
    assert not alibi.state_dict()


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_after_evaluation_in_inference_mode(kind: str, dropout: float) -> None:
    def train(evaluate_first: bool) -> torch.Tensor:
        torch.manual_seed(0)
        rotary, alibi = (Rotary(4) if kind == "rotary" else None), kind == "alibi"
        layer = ParallelAttention(
            8, 2, Axis.single("tp"), rotary=rotary, alibi=alibi, dropout=dropout, dtype=F64
        )
        if evaluate_first:
            with torch.inference_mode():
                layer.eval()(values(5, 1, 8))
        x = values(5, 1, 8).requires_grad_()
        layer.train()(x, keys=torch.arange(5, dtype=torch.int32).view(5, 1)).square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(train(True), train(False))
