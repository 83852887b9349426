"""Masks depend on what they mask: seed, step, sample, layer, place, position. Evaluation has none."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, DropoutStreams, Mesh, all_reduce, broadcast
from shardweave.models import Transformer, parts_from_ranges
from shardweave.models.block import Block
from shardweave.models.dropout import Masks

CONFIG = replace(FAMILIES["bloom"], dropout=0.5, attention_dropout=0.5)
SAMPLES = torch.tensor([4, 1, 9])


def _streams(seed: int = 3, step: int = 7, samples: Tensor = SAMPLES) -> DropoutStreams:
    return DropoutStreams(seed, step, samples)


def _hidden_masks(streams: DropoutStreams | None, hidden: float = 0.5) -> Masks:
    return Masks(streams, hidden=hidden, attention=0.0, positions=torch.arange(64), local=torch.arange(64))


def test_elements_are_dropped_with_the_probability_and_the_rest_scaled() -> None:
    x = torch.ones(64, 3, 100, dtype=torch.float64)
    dropped = _hidden_masks(_streams(), 0.3).drop(x, 0, "mlp_output")
    kept = dropped != 0
    assert kept.double().mean().item() == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / 0.7))


def test_places_and_layers_have_masks_of_their_own() -> None:
    x = torch.ones(64, 3, 16)
    masks = _hidden_masks(_streams())
    seen = [masks.drop(x, layer, place) for layer in (0, 1) for place in ("attention_output", "mlp_output")]
    seen += [_hidden_masks(_streams(seed=4)).drop(x, 0, "mlp_output")]
    seen += [_hidden_masks(_streams(step=8)).drop(x, 0, "mlp_output")]
    for index, left in enumerate(seen):
        for right in seen[index + 1 :]:
            assert (left == right).float().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("hidden", "attention"), [(0.5, 0.0), (0.0, 0.5)], ids=["hidden", "attention"])
def test_each_block_has_masks_of_its_own(hidden: float, attention: float) -> None:
    """Blocks with equal weights and inputs, and the two places inside each of them."""
    config = replace(CONFIG, dropout=hidden, attention_dropout=attention)
    first, second = (Block(config, layer, Axis.single()) for layer in (0, 1))
    second.load_state_dict(first.state_dict())
    places = torch.arange(8)
    masks = Masks(_streams(), hidden=hidden, attention=attention, positions=places, local=places)
    x = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(2))
    assert torch.equal(first(x, masks), first(x, masks))
    assert not torch.equal(first(x, masks), second(x, masks))
    seen: list[tuple[int, str]] = []

    def record(x: Tensor, layer: int, place: str) -> Tensor:
        seen.append((layer, place))
        return x

    masks.drop = record  # type: ignore[method-assign]
    second(x, masks)
    assert seen == [(1, "attention_output"), (1, "mlp_output")]


def test_a_sample_has_its_mask_in_whatever_batch_it_comes() -> None:
    model = build(CONFIG)
    tokens, _ = batch_of(CONFIG)
    together = model(tokens, streams=_streams())
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(
        model(tokens[order], streams=_streams(samples=SAMPLES[order])),
        together[:, order],
        rtol=1e-12,
        atol=1e-12,
    )
    assert (model(tokens, streams=_streams(step=8)) - together).abs().max() > 1e-3


def test_streams_of_another_batch_are_refused() -> None:
    tokens, _ = batch_of(CONFIG)
    with pytest.raises(ValueError, match=r"samples of shape \(2,\) for a micro-batch of 3"):
        build(CONFIG)(tokens, streams=_streams(samples=SAMPLES[:2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_drop_what_the_whole_drops(family: str) -> None:
    config = replace(FAMILIES[family], dropout=0.5, attention_dropout=0.5)
    tokens, _ = batch_of(config)
    x = tokens
    for part in parts_from_ranges(config, [range(2), range(2, 4)]):
        x = build(config, part=part)(x, streams=_streams())
    assert torch.equal(x, build(config)(tokens, streams=_streams()))


def test_plain_loops_draw_from_torchs_generator() -> None:
    model = build(CONFIG)
    tokens, _ = batch_of(CONFIG)
    torch.manual_seed(1)
    first, second = model(tokens), model(tokens)
    torch.manual_seed(1)
    assert torch.equal(model(tokens), first)
    assert not torch.equal(first, second)


def test_without_dropout_nothing_is_drawn() -> None:
    model = build(FAMILIES["bloom"])
    tokens, _ = batch_of(CONFIG)
    state = torch.get_rng_state()
    model(tokens)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.ranks(4)
def test_b029_tensor_ranks_share_masks_and_data_ranks_do_not() -> None:
    """Without streams, and with every rank's generator seeded differently."""
    mesh = Mesh(dp=2, tp=2)
    config = replace(FAMILIES["bloom"], dropout=0.5, attention_dropout=0.5)
    torch.manual_seed(100 + mesh.world.rank)
    tokens, targets = batch_of(config)
    split = build(config, tensor=mesh.tp, sequence_parallel=True)
    loss = split.loss(split(tokens), targets)
    assert torch.equal(broadcast(loss.detach().clone(), mesh.tp), loss)
    other = broadcast(loss.detach().clone(), mesh.dp, 1)
    assert torch.equal(other, loss) == (mesh.dp.rank == 1)
    torch.manual_seed(100 + 2 * mesh.dp.rank)  # what the first tensor rank had
    whole = build(config)
    torch.testing.assert_close(loss, whole.loss(whole(tokens), targets), rtol=1e-10, atol=0)


@pytest.mark.parametrize("given", [True, False], ids=["streams", "torch"])
def test_b036_evaluation_neither_drops_nor_disturbs(given: bool) -> None:
    tokens, targets = batch_of(CONFIG)
    plain = build(FAMILIES["bloom"])
    evaluated, undisturbed = build(CONFIG), build(CONFIG)
    finals = []
    for model, evaluate in ((evaluated, True), (undisturbed, False)):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if evaluate and step == 2:
                model.eval()
                with torch.no_grad():
                    one, two = (model(tokens, streams=_streams() if given else None) for _ in range(2))
                model.train()
                plain.load_state_dict(model.state_dict())
                assert torch.equal(one, two)
                assert torch.equal(one, plain(tokens))
            streams = _streams(step=step) if given else None
            (model.loss(model(tokens, streams=streams), targets) / 20).backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append(model.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize("kind", ["tp", "cp"])
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
def test_b027_a_recomputed_block_drops_the_same_without_any_state(ranks: int, kind: str) -> None:
    """Recomputation through torch's checkpoint, told not to preserve generators; whose states stay as they are."""
    tokens, targets = batch_of(CONFIG)
    mesh = Mesh(tp=ranks) if kind == "tp" else Mesh(cp=ranks)
    plain, again = (build(CONFIG, tensor=mesh.tp, context=mesh.cp) for _ in range(2))
    _recompute(again)
    before = torch.get_rng_state()
    for model in (plain, again):
        model.loss(model(tokens, streams=_streams()), targets).backward()
    assert torch.equal(torch.get_rng_state(), before)
    for (name, left), right in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad), name


@pytest.mark.ranks(2)
def test_b027_on_two_tensor_ranks() -> None:
    """Gradients bit-equal with and without recomputation, and torch's generator in the same state afterwards."""
    axis = Mesh(tp=2).tp
    tokens, targets = batch_of(CONFIG)
    for sequence_parallel in (False, True):
        for given in (True, False):
            grads, states = [], []
            for recompute in (False, True):
                model = build(CONFIG, tensor=axis, sequence_parallel=sequence_parallel)
                if recompute:
                    _recompute(model)
                torch.manual_seed(5 + axis.rank)
                model.loss(model(tokens, streams=_streams() if given else None), targets).backward()
                states.append(torch.get_rng_state())
                grads.append([p.grad for p in model.parameters() if p.grad is not None])
            assert torch.equal(states[0], states[1])
            assert len(grads[0]) == len(list(model.parameters()))
            assert all(torch.equal(left, right) for left, right in zip(*grads, strict=True))


@pytest.mark.ranks(2)
def test_b036_on_two_ranks() -> None:
    """Both ranks of a split model evaluate it; of two replicas, the first alone does."""
    split, replicas = Mesh(tp=2), Mesh(dp=2)
    for mesh in (split, replicas):
        for given in (True, False):
            undisturbed, _ = _train(mesh, given, evaluate=False)
            everywhere, losses = _train(mesh, given, evaluate=mesh is split or mesh.dp.is_first)
            assert len(set(losses)) == (1 if losses else 0)
            assert all(torch.equal(left, right) for left, right in zip(undisturbed, everywhere, strict=True))
            if mesh is replicas:
                assert all(torch.equal(broadcast(value.clone(), mesh.dp), value) for value in everywhere)


def _train(mesh: Mesh, given: bool, *, evaluate: bool) -> tuple[list[Tensor], list[float]]:
    """Two steps, two evaluations or none, two steps: the parameters, and what evaluation found."""
    tokens, targets = batch_of(CONFIG)
    model = build(CONFIG, tensor=mesh.tp)
    torch.manual_seed(5 + mesh.world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        if evaluate and step == 2:
            state = torch.get_rng_state()
            for _ in range(2):
                model.eval()
                with torch.no_grad():
                    losses.append(model.loss(model(tokens), targets).item())
                model.train()
            assert torch.equal(torch.get_rng_state(), state)
        samples = SAMPLES + 10 * mesh.dp.rank
        streams = _streams(step=step, samples=samples) if given else None
        (model.loss(model(tokens, streams=streams), targets) / 20).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            all_reduce(parameter.grad, mesh.dp)
        optimizer.step()
        optimizer.zero_grad()
    assert all(module.training for module in model.modules())
    return [parameter.detach() for parameter in model.parameters()], losses


def _recompute(model: Transformer) -> None:
    for name, block in model.layers.items():
        model.layers[name] = _Recomputed(cast(Block, block))


class _Recomputed(torch.nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *others: object) -> Tensor:
        y: Tensor = checkpoint(self.block, x, *others, use_reentrant=False, preserve_rng_state=False)
        return y
