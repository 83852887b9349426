"""Random numbers by what they are for: reproducible, independent, uniform, the same however cut."""

from __future__ import annotations

import pytest
import torch

from shardweave.comm import (
    DropoutStreams,
    combine_keys,
    keyed_dropout,
    keyed_uniform,
    named_generator,
    named_seed,
)


def test_seeds_differ_in_every_part() -> None:
    seeds = {
        named_seed(1, "a", 2), named_seed(1, "a", 3), named_seed(2, "a", 2), named_seed(1, "b", 2),
        named_seed("1", "a", 2), named_seed(1, "a"), named_seed(1, "a2"),
    }  # fmt: skip
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    first = torch.randn(3, generator=named_generator(7, "w"))
    assert torch.equal(first, torch.randn(3, generator=named_generator(7, "w")))


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    keys = DropoutStreams(1, 2, torch.arange(50)).keys(3, "mlp", torch.arange(40))
    u = keyed_uniform(keys, 500).double()  # 10^6 numbers: standard errors 3e-4 and 1e-3
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean().item() - 0.5) < 1.5e-3
    assert abs(u.var().item() - 1 / 12) < 5e-4
    centred = u - 0.5
    for shifted in (centred.roll(1, -1), centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * shifted).mean().item() * 12) < 6e-3
    counts = torch.histc(u, 64, 0, 1)
    chi_square = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum().item()
    assert 20 < chi_square < 125  # 63 degrees of freedom: far beyond p = 1e-5 on either side


def test_a_part_has_the_same_numbers_as_the_whole() -> None:
    streams = DropoutStreams(1, 2, torch.tensor([5, 2**40, 7]))
    whole = keyed_uniform(streams.keys(0, "attention", torch.arange(8)), 10)
    later = keyed_uniform(streams.keys(0, "attention", torch.arange(4, 8)), 10)
    one = keyed_uniform(DropoutStreams(1, 2, torch.tensor([2**40])).keys(0, "attention", torch.arange(8)), 10)
    assert torch.equal(whole[4:], later)
    assert torch.equal(whole[:, 1:2], one)
    assert torch.equal(
        keyed_uniform(streams.keys(0, "attention", torch.arange(8)), 6, offset=4), whole[..., 4:]
    )


@pytest.mark.parametrize("other", [
    DropoutStreams(2, 2, torch.arange(4)), DropoutStreams(1, 3, torch.arange(4)),
    DropoutStreams(1, 2, torch.arange(4) + 2**32),
])  # fmt: skip
def test_streams_differ_by_seed_step_and_sample(other: DropoutStreams) -> None:
    own = DropoutStreams(1, 2, torch.arange(4)).keys(0, "mlp", torch.arange(6))
    assert (own != other.keys(0, "mlp", torch.arange(6))).float().mean() > 0.9
    same = DropoutStreams(1, 2, torch.arange(4))
    assert (own != same.keys(1, "mlp", torch.arange(6))).all()
    assert (own != same.keys(0, "attention", torch.arange(6))).all()


def test_dropout_scales_what_it_keeps() -> None:
    keys = DropoutStreams(1, 2, torch.arange(64)).keys(0, "mlp", torch.arange(64))
    x = torch.ones(64, 64, 64, dtype=torch.float64, requires_grad=True)
    y = keyed_dropout(x, 0.25, keys)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs((y == 0).double().mean().item() - 0.25) < 4e-3
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert keyed_dropout(x, 0.0, keys) is x
    assert keyed_dropout(x, 1.0, keys).abs().max().item() == 0.0
    with pytest.raises(ValueError, match=r"probability 1.5 is not in \[0, 1\]"):
        keyed_dropout(x, 1.5, keys)
    assert combine_keys(keys.unsqueeze(-1), torch.arange(3)).shape == (64, 64, 3)
