"""One process: equal to a plain implementation in every family, and right at its edges."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build, reference_logits, reference_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave import comm
from shardweave.models import Part, Transformer, TransformerConfig, count_parameters, parameter_shapes
from shardweave.models.dropout import Masks

GPT2 = FAMILIES["gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_plain_implementation(family: str) -> None:
    config = FAMILIES[family]
    model = build(config)
    tokens, targets = batch_of(config)
    logits = model(tokens)
    loss = model.loss(logits, targets)
    loss.backward()
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    expected = reference_logits(config, weights, tokens)
    expected_loss = reference_loss(config, weights, tokens, targets)
    expected_loss.backward()
    torch.testing.assert_close(logits, expected.transpose(0, 1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        largest = max(float(weights[name].grad.abs().max()), 1e-3)
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=0, atol=1e-10 * largest, msg=name)


class Copies(TorchDispatchMode):
    """Shapes that were copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.seen.append(tuple(arguments[0].shape))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "parallel"])
def test_hidden_states_are_not_turned_over_between_the_blocks(family: str) -> None:
    """On a CPU, whose attention has the batch first."""
    config = FAMILIES[family]
    model, (tokens, targets) = build(config), batch_of(config)
    with Copies() as copies:
        model.loss(model(tokens), targets).backward()
    assert {(*shape, config.hidden) for shape in ((8, 3), (3, 8))}.isdisjoint(copies.seen)


def test_blocks_are_torchs_own_encoder_layers() -> None:
    """``nn.TransformerEncoderLayer``, norm first, under a causal mask, is a block of the plainest family."""
    config = replace(GPT2, activation="gelu")
    model = build(config)
    x = torch.randn(8, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for block in model.layers.values():
        theirs = torch.nn.TransformerEncoderLayer(
            16, 4, 64, dropout=0.0, activation="gelu", norm_first=True, dtype=torch.float64
        )
        ours = dict(block.named_parameters())
        roles = ("query", "key", "value")
        for kind in ("weight", "bias"):
            stacked = torch.cat([ours[f"attention.{role}.{kind}"] for role in roles])
            renamed = {
                f"self_attn.in_proj_{kind}": stacked,
                f"self_attn.out_proj.{kind}": ours[f"attention.output.{kind}"],
                f"linear1.{kind}": ours[f"mlp.up.{kind}"],
                f"linear2.{kind}": ours[f"mlp.down.{kind}"],
                f"norm1.{kind}": ours[f"attention_norm.{kind}"],
                f"norm2.{kind}": ours[f"mlp_norm.{kind}"],
            }
            theirs.load_state_dict(renamed, strict=False)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
        expected = theirs(x, src_mask=mask, is_causal=True)
        masks = Masks(None, hidden=0.0, attention=0.0, positions=torch.arange(8), local=torch.arange(8))
        torch.testing.assert_close(block(x, masks), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_the_tables(family: str) -> None:
    config = FAMILIES[family]
    model = Transformer(config)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert built == {entry.name: entry.shape for entry in parameter_shapes(config)}
    assert list(model.state_dict()) == list(built)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(config)
    for name, parameter in model.named_parameters():
        record = comm.sharding_of(parameter)
        assert (record.name, record.shape, record.splits, record.partial) == (name, parameter.shape, (), ())


def test_a_causal_model_does_not_see_the_future() -> None:
    model = build(FAMILIES["bloom"])
    tokens, _ = batch_of(FAMILIES["bloom"])
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:4], after[:4], rtol=1e-12, atol=1e-12)
    assert (before[4:] - after[4:]).abs().max() > 1e-3


def test_the_first_loss_is_that_of_guessing() -> None:
    model = Transformer(TransformerConfig(layers=2, hidden=64, heads=4, vocab=256, sequence=32))
    tokens = torch.arange(128).view(4, 32)
    loss = model.loss(model(tokens), tokens.flip(1)) / tokens.numel()
    assert abs(loss.item() - math.log(256)) < 0.1


def test_b015_the_loss_is_a_sum_and_is_divided_once() -> None:
    """Token losses {1, 2, 3} and {6} in two micro-batches: 12 / 4 = 3, where a mean of means gives 4."""
    model = build(GPT2)
    logits, targets = _logits_with_losses([[1.0, 2.0, 3.0], [6.0, 0.0, 0.0]])
    targets[1, 1:] = -100
    parts = [model.loss(logits[:, row : row + 1], targets[row : row + 1]) for row in range(2)]
    assert [part.item() for part in parts] == pytest.approx([6.0, 6.0], abs=1e-12)
    whole = model.loss(logits, targets) / 4
    assert whole.item() == pytest.approx(3.0, abs=1e-12)
    assert sum(part.item() for part in parts) / 4 == pytest.approx(3.0, abs=1e-12)


def test_b015_micro_batches_give_the_gradient_of_the_wholebatch_of() -> None:
    tokens, targets = batch_of(GPT2)
    targets[1, :] = -100
    targets[1, 0] = 3
    valid = int((targets != -100).sum())
    whole, parts = build(GPT2), build(GPT2)
    (whole.loss(whole(tokens), targets) / valid).backward()
    for row in range(3):
        one = slice(row, row + 1)
        (parts.loss(parts(tokens[one]), targets[one]) / valid).backward()
    for (name, left), right in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_b019_no_valid_label_is_a_loss_of_zero() -> None:
    model = build(GPT2)
    tokens, targets = batch_of(GPT2)
    loss = model.loss(model(tokens), torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_b026_an_odd_vocabulary_is_not_padded() -> None:
    model = Transformer(GPT2, dtype=torch.float64)
    torch.nn.init.zeros_(model.embedding.weight)
    tokens, targets = batch_of(GPT2)
    each = model.loss(model(tokens), targets) / (targets != -100).sum()
    assert each.item() == pytest.approx(2.397895, abs=1e-6)  # ln 11


@pytest.mark.parametrize("family", FAMILIES)
def test_b011_a_meta_model_materialises_with_ties_and_records(family: str) -> None:
    config = FAMILIES[family]
    model = Transformer(config, device="meta", dtype=torch.float64)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError, match="meta device"):
        model.initialize(3)
    model.to_empty(device="cpu")
    model.initialize(3)
    built = Transformer(config, seed=3, dtype=torch.float64)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(config)
    for (name, left), right in zip(model.named_parameters(), built.parameters(), strict=True):
        assert torch.equal(left, right), name
        assert comm.sharding_of(left) == comm.sharding_of(right)
    assert ("head.weight" in model.state_dict()) != config.tie_embeddings
    if config.tie_embeddings:
        tokens, targets = batch_of(config)
        model.loss(model(tokens), targets).backward()
        unseen = sorted(set(range(config.vocab)) - set(tokens.flatten().tolist()))
        assert model.embedding.weight.grad[unseen].any()  # type: ignore[index]  # through the head only


def test_the_meta_context_is_respected() -> None:
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in Transformer(GPT2).parameters())


def test_building_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    Transformer(GPT2)
    assert torch.equal(state, torch.get_rng_state())


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = build(GPT2)
    twin = copy.deepcopy(model)
    tokens, _ = batch_of(GPT2)
    assert torch.equal(model(tokens), twin(tokens))
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert left is not right
        assert comm.sharding_of(left) == comm.sharding_of(right)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_run_one_after_the_other_are_the_whole(family: str) -> None:
    """Three parts, the ends without blocks; the tied head's copy takes its own share of the gradient."""
    config = FAMILIES[family]
    parts = [
        Part(0, 1, embedding=True, head=False),
        Part(1, 2, embedding=False, head=False),
        Part(2, 2, embedding=False, head=True),
    ]
    whole, stages = build(config), [build(config, part=part) for part in parts]
    tokens, targets = batch_of(config)
    expected = whole.loss(whole(tokens), targets)
    expected.backward()
    x = tokens
    for stage in stages:
        x = stage(x)
    loss = stages[-1].loss(x, targets)
    loss.backward()
    assert torch.equal(loss, expected)
    gradients: dict[str, Tensor] = {}
    for part, stage in zip(parts, stages, strict=True):
        assert sum(parameter.numel() for parameter in stage.parameters()) == count_parameters(
            config, part=part
        )
        for name, parameter in stage.named_parameters():
            assert comm.sharding_of(parameter).name == name
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
    tied = [[name for name, _ in stage.tied_parameters()] for stage in stages]
    assert tied == (
        [["embedding.weight"], [], ["embedding.weight"]] if config.tie_embeddings else [[], [], []]
    )
    if config.tie_embeddings:
        assert torch.equal(stages[0].embedding.weight, stages[2].embedding.weight)
    assert whole.tied_parameters() == []


def test_statistics_are_wide_in_bfloat16() -> None:
    """A norm of 16 numbers around 300 loses everything when their mean is taken in bfloat16."""
    for config in (GPT2, FAMILIES["llama"]):
        narrow = Transformer(config, dtype=torch.bfloat16).norm
        wide = Transformer(config, dtype=torch.float32).norm
        x = (300 + torch.arange(16.0)).bfloat16()
        torch.testing.assert_close(narrow(x).float(), wide(x.float()), rtol=8e-3, atol=8e-3)
    model = Transformer(GPT2, dtype=torch.bfloat16)
    tokens, targets = batch_of(GPT2)
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert model.loss(logits, targets).dtype == torch.float32


def test_wrong_inputs_are_named() -> None:
    model = Transformer(GPT2)
    tokens, targets = batch_of(GPT2)
    with pytest.raises(ValueError, match="9 tokens, but there are learned positions for 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="integers"):
        model(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"targets are \[b, s\]"):
        model.loss(model(tokens), targets[:, 1:])
    middle = Transformer(GPT2, part=Part(0, 1, embedding=False, head=False))
    with pytest.raises(ValueError, match=r"hidden states are \[s, b, 16\]"):
        middle(torch.zeros(6, 2, 15))
    with pytest.raises(ValueError, match="ends with block 2, but the model has 2"):
        Transformer(GPT2, part=Part(0, 3, embedding=True, head=True))


def test_relative_positions_have_no_longest_sequence() -> None:
    for family in ("bloom", "llama"):
        config = replace(FAMILIES[family], sequence=4)
        assert Transformer(config)(torch.zeros(1, 9, dtype=torch.int64)).shape == (9, 1, 11)


def _logits_with_losses(losses: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Logits ``[s, b, 11]`` whose cross entropy at target 0 is as given, and those targets ``[b, s]``."""
    wanted = torch.tensor(losses, dtype=torch.float64)
    probability = torch.exp(-wanted)
    others = (1 - probability).unsqueeze(-1).expand(-1, -1, 10) / 10
    logits = torch.cat([probability.unsqueeze(-1), others], -1).clamp_min(1e-300).log()
    return logits.transpose(0, 1), torch.zeros(wanted.shape, dtype=torch.int64)


def test_both_ends_on_one_rank_share_a_tied_embedding() -> None:
    config, tokens, targets = GPT2, *batch_of(GPT2)
    whole = Transformer(config, seed=3, dtype=torch.float64)
    whole.loss(whole(tokens), targets).backward()
    first, last = (
        Transformer(config, part=part, seed=3, dtype=torch.float64)
        for part in (
            Part(0, 1, embedding=True, head=False),
            Part(1, config.layers, embedding=False, head=True),
        )
    )
    last.share_embedding(first)
    assert last.embedding.weight is first.embedding.weight
    last.loss(last(first(tokens)), targets).backward()
    torch.testing.assert_close(
        first.embedding.weight.grad, whole.embedding.weight.grad, rtol=1e-12, atol=1e-12
    )
    with pytest.raises(ValueError, match="it takes the embedding's part and the head's, which are tied"):
        first.share_embedding(whole)
    untied = replace(config, tie_embeddings=False)
    with pytest.raises(ValueError, match="tie_embeddings=False"):
        Transformer(untied, part=last.part).share_embedding(Transformer(untied, part=first.part))
