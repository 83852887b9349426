"""The head's z-loss: trained on, not reported, the same in every layout; in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build
from packages.models.tests.training import expect_equal_training, near
from torch import Tensor

from shardweave.comm import Mesh, all_reduce
from shardweave.models import Transformer, TransformerConfig
from shardweave.tensor_parallel import head_loss

FACTOR = 0.3
TIED, UNTIED = (replace(FAMILIES[family], head_z_loss=FACTOR) for family in ("gpt2", "llama"))


def _written_out(model: Transformer, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy and ``logsumexp^2``, summed over valid tokens."""
    logits = model(batch_of(model.config)[0]).transpose(0, 1)
    valid = targets != -100
    of_words = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(of_words * valid).sum(), (logits.logsumexp(-1).square() * valid).sum()


def test_the_gradient_has_it_and_the_loss_has_not() -> None:
    tokens, targets = batch_of(TIED)
    assert (targets == -100).any()
    assert (targets != -100).any()
    truth = build(replace(TIED, head_z_loss=0.0))
    loss, square = _written_out(truth, targets)
    (loss + FACTOR * square).backward()
    expected = {name: parameter.grad for name, parameter in truth.named_parameters()}
    for chunked in (False, True):
        model = build(TIED, chunked_loss=chunked)
        found = model.loss(model(tokens), targets)
        assert torch.equal(found, truth.loss(truth(tokens), targets))  # to the last bit
        found.backward()
        for name, parameter in model.named_parameters():
            near(parameter.grad, expected[name], name, rtol=1e-9)
        near(model.take_head_z_loss(), square.detach())
        assert model.take_head_z_loss() == 0  # once
    model.eval()
    near(model.loss(model(tokens), targets), loss)
    assert model.take_head_z_loss() == 0


def test_no_valid_label_is_nothing() -> None:
    for chunked in (False, True):
        model = build(TIED, chunked_loss=chunked)
        tokens, targets = batch_of(TIED)
        loss = model.loss(model(tokens), torch.full_like(targets, -100))
        loss.backward()
        assert loss == 0
        assert model.take_head_z_loss() == 0
        assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.ranks(2)
def test_two_ranks_train_as_one_process() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss, "_CHUNK_ON_CPU", 55)
        for config, mesh, chunked in (
            (TIED, Mesh(tp=2), False),
            (UNTIED, Mesh(tp=2), True),
            (TIED, Mesh(cp=2), False),
            (UNTIED, Mesh(cp=2), True),
        ):
            whole = build(config)
            split = build(
                config,
                tensor=mesh.tp,
                context=mesh.cp,
                sequence_parallel=mesh.tp.size > 1,
                chunked_loss=chunked,
            )
            expect_equal_training(whole, split)
            near(all_reduce(split.take_head_z_loss(), mesh.cp), whole.take_head_z_loss())


def test_a_factor_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_z_loss: -0\.5 must be"):
        TransformerConfig(layers=1, hidden=8, heads=2, vocab=5, sequence=4, head_z_loss=-0.5)
