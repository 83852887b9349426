"""Compiled blocks: the same bits as without, and what is refused. Layouts: ``integration_tests.compiled``."""

from __future__ import annotations

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build
from torch import Tensor

from shardweave.models import Transformer, generate


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile asks for it
def test_compiled_blocks_give_the_same() -> None:
    """As autograd cuts them: the compiler behind that takes minutes, as do other lengths, for each of which it runs."""
    models = [build(FAMILIES["gpt2"]) for _ in range(2)]
    names = list(models[1].state_dict())
    models[1].compile_blocks(backend="aot_eager")
    assert list(models[1].state_dict()) == names
    found: list[list[Tensor]] = []
    for model in models:
        tokens, targets = batch_of(model.config)
        loss = model.loss(model(tokens), targets)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_with_a_cache_nothing_is_compiled_for_each_token() -> None:
    model, prompt = build(FAMILIES["llama"]), batch_of(FAMILIES["llama"])[0][:, :2]
    expected = generate(model, prompt, 6)
    torch._dynamo.utils.counters.clear()
    model.compile_blocks(backend="eager")
    assert torch.equal(generate(model, prompt, 6), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_whole_blocks_that_run_again_are_refused() -> None:
    for mode in ("full", {"every": 2}, {"operations": ["attention"]}):
        model = Transformer(FAMILIES["gpt2"], recompute=mode, device="meta")
        with pytest.raises(ValueError, match=r"compile: with recompute: .*; use recompute none or selective"):
            model.compile_blocks()
