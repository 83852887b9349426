"""Sampling: greedy, by temperature, among the likeliest, and leaving everything as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build

from shardweave.models import Part, Transformer, generate


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_takes_the_likeliest_token_of_a_sliding_window(family: str) -> None:
    """Beyond the sequence length too: the prompt has 6 of 8 tokens and 5 are added."""
    model = build(FAMILIES[family])
    prompt = batch_of(FAMILIES[family])[0][:, :6]
    text = generate(model, prompt, 5, temperature=0)
    assert text.shape == (3, 11)
    assert torch.equal(text[:, :6], prompt)
    for end in range(6, 11):
        logits = model(text[:, max(end - 8, 0) : end])
        assert torch.equal(text[:, end], logits[-1].argmax(-1))


def test_the_generator_decides_and_torchs_own_is_left_alone() -> None:
    model = build(FAMILIES["gpt2"])
    prompt = batch_of(FAMILIES["gpt2"])[0][:, :2]
    state = torch.get_rng_state()
    draws = [generate(model, prompt, 6, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(generate(model, prompt, 6), generate(model, prompt, 6))


def test_top_k_draws_from_the_k_likeliest_by_their_probabilities() -> None:
    model = build(FAMILIES["gpt2"])
    prompt = torch.full((4000, 1), 3)
    drawn = generate(model, prompt, 1, top_k=2, temperature=0.5)[:, -1]
    logits = model(prompt[:1])[-1, 0]
    values, tokens = logits.topk(2)
    expected = torch.softmax(values / 0.5, -1)
    assert set(drawn.tolist()) <= set(tokens.tolist())
    share = (drawn == tokens[0]).double().mean().item()
    assert share == pytest.approx(expected[0].item(), abs=0.04)  # five standard deviations
    assert torch.equal(generate(model, prompt[:1], 3, top_k=1), generate(model, prompt[:1], 3, temperature=0))


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_is_restored(training: bool) -> None:
    model = build(replace(FAMILIES["gpt2"], dropout=0.5)).train(training)
    prompt = batch_of(FAMILIES["gpt2"])[0]
    assert torch.equal(generate(model, prompt, 3, temperature=0), generate(model, prompt, 3, temperature=0))
    assert model.training == training


def test_wrong_arguments_are_named() -> None:
    model = build(FAMILIES["gpt2"])
    prompt = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, prompt[:, :0], 1)
    with pytest.raises(ValueError, match="new: -1"):
        generate(model, prompt, -1)
    with pytest.raises(ValueError, match="temperature: -1"):
        generate(model, prompt, 1, temperature=-1.0)
    with pytest.raises(ValueError, match="top_k: 0"):
        generate(model, prompt, 1, top_k=0)
    part = Transformer(FAMILIES["gpt2"], part=Part(0, 2, embedding=True, head=False))
    with pytest.raises(ValueError, match="split"):
        generate(part, prompt, 1)
