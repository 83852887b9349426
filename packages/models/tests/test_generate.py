"""Sampling: greedy, by temperature, among the likeliest, and leaving everything as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from packages.models.tests.reference import FAMILIES, MIXTURES, batch_of, build
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.models import Part, Transformer, continue_text, continue_texts, generate


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
    with pytest.raises(ValueError, match="generators: 1 for 2 texts"):
        continue_texts(lambda texts: None, [prompt, prompt], 1, generators=[torch.Generator()])
    with pytest.raises(ValueError, match="step: gave no logits"):
        continue_text(lambda text: None, prompt, 1)


def _given(model: Transformer) -> list[int]:
    """How many tokens each pass is given from now on."""
    lengths: list[int] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        lengths.append(inputs[0].shape[1])

    model.register_forward_pre_hook(note)
    return lengths


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_the_text_is_the_same_with_a_cache(family: str) -> None:
    """Up to the end of the sequence of 8 and beyond it, where the window moves and nothing can be kept."""
    config = {**FAMILIES, **MIXTURES}[family]
    model = build(config)
    given = _given(model)
    for start, new in ((3, 5), (1, 9), (8, 2), (10, 2)):
        prompt = batch_of(config, sequence=start)[0]
        for temperature in (0.0, 1.5):
            texts = []
            for cache in (True, False):
                given.clear()
                texts.append(generate(model, prompt, new, temperature=temperature, top_k=7, cache=cache))
                without = [min(start + count, 8) for count in range(new)]
                kept = [start if not count else 1 if start + count <= 8 else 8 for count in range(new)]
                kept = without if not cache or start >= 8 or config.expert_capacity else kept
                assert given == kept
            assert torch.equal(*texts)


@pytest.mark.ranks(4)
def test_the_text_is_the_same_over_ranks() -> None:
    """Four ranks and two, each with a generator of its own, of which the first one's counts."""
    four, two = Mesh(tp=4).tp, Mesh(dp=2, tp=2).tp
    configs = {**FAMILIES, **MIXTURES}
    cases = [(four, config, 1.5) for config in configs.values()]
    cases += [(two, configs[name], 1.5) for name in ("bloom", "llama", "switch")]
    cases += [(axis, configs["mixed"], 0.0) for axis in (two, four)]
    for axis, config, temperature in cases:
        prompt = batch_of(config)[0][:, :4]
        own, first = (torch.Generator().manual_seed(seed) for seed in (axis.rank, 0))
        found = generate(build(config, tensor=axis), prompt, 6, temperature=temperature, generator=own)
        assert torch.equal(
            found, generate(build(config), prompt, 6, temperature=temperature, generator=first)
        )
    with pytest.raises(ValueError, match=r"generate: .*sequence_parallel=True"):
        generate(build(FAMILIES["bloom"], tensor=four, sequence_parallel=True), prompt, 1)


@pytest.mark.ranks(2)
def test_what_goes_over_the_wire_is_of_new_tokens_and_of_the_last_ones_logits() -> None:
    """Two tokens, then five times one: sums behind the embedding and twice in both blocks, no logits but the last."""
    mesh = Mesh(tp=2)
    config = FAMILIES["gpt2"]
    model, prompt = build(config, tensor=mesh.tp), batch_of(config)[0][:, :2]
    generate(model, prompt, 1)  # the first pass compares token ids, too
    mesh.ledger.reset()
    generate(model, prompt, 6)
    sent = {kind: mesh.ledger.total("tp", kind).bytes for kind in ("all_reduce", "all_gather")}
    assert sent == {"all_reduce": 5 * (2 + 5) * 3 * 16 * 8, "all_gather": 6 * 3 * 11 * 8}
    assert mesh.ledger.total("tp", "broadcast").calls == 6


def test_texts_do_not_depend_on_the_others_beside_them() -> None:
    """Of different lengths, in one loop, with a step of one's own; and picks go through `share`."""
    model = build(FAMILIES["plain"]).eval()
    prompts = [batch_of(FAMILIES["plain"], sequence=length)[0][:rows] for length, rows in ((2, 1), (5, 3))]
    shared: list[int] = []

    def step(texts: Sequence[Tensor]) -> list[Tensor]:
        return [model(text)[-1] for text in texts]

    def share(picked: Tensor | None) -> Tensor:
        assert picked is not None
        shared.append(len(picked))
        return picked

    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    with torch.no_grad():
        texts = continue_texts(step, prompts, 3, generators=generators, share=share)
    assert shared == [4, 4, 4]
    for seed, prompt, text in zip((3, 4), prompts, texts, strict=True):
        assert torch.equal(text, generate(model, prompt, 3, generator=torch.Generator().manual_seed(seed)))


def test_a_text_ends_at_its_end_and_the_loop_when_all_have_ended() -> None:
    """Row 0 ends after its second new token, row 1 after its third; what they pick later does not matter."""
    planned = torch.tensor([[4, 9, 5, 6, 7], [9, 4, 9, 1, 1], [4, 4, 9, 9, 9]])[:, :, None]  # [row, new, 1]
    calls: list[int] = []

    def step(text: Tensor) -> Tensor:
        calls.append(text.shape[1])
        return 1000.0 * (torch.arange(10) == planned[: len(text), text.shape[1] - 1])

    text = continue_text(step, torch.tensor([[9], [1], [1]]), 5, end=9)  # a prompt may have the token
    assert text.tolist() == [[9, 4, 9, 9], [1, 9, 9, 9], [1, 4, 4, 9]]
    assert calls == [1, 2, 3]
    assert continue_text(step, torch.tensor([[1]]), 5).tolist() == [[1, 4, 9, 5, 6, 7]]
    assert generate(build(FAMILIES["gpt2"]), torch.tensor([[1]]), 3, temperature=0, end=None).shape == (1, 4)
