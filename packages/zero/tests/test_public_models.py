"""Models that other people wrote, untouched, in the plain loop: equal to plain PyTorch at every stage.

transformers' GPT-2 and Llama with random weights, and a small residual network. transformers is imported for
this test's ranks alone: it takes seconds, and the other tests do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, assert_equal, make_optimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from shardweave.comm import Mesh

STEPS = 4
SMALL = 0.03
"""MiB in a unit: a few of them in each model."""

VOCABULARY, SEQUENCE = 67, 12

TRANSFORMERS = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")]


@dataclass(frozen=True)
class Subject:
    """A model and what it is trained on."""

    build: Callable[[], nn.Module]
    """With the same values each time."""
    loss: Callable[[nn.Module, int, int], Tensor]
    """Of one rank in one step, by module, step and rank."""


def train_plainly(subject: Subject, ranks: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """One process on the mean over the ranks, and the buffers as each rank would have them.

    Batch statistics are a rank's own, as with DDP: so every rank has its buffers, and all share the parameters.
    """
    net = subject.build()
    own = [{name: buffer.clone() for name, buffer in net.named_buffers()} for _ in range(ranks)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        for rank in range(ranks):
            exchange_buffers(net, own[rank])
            (subject.loss(net, step, rank) / ranks).backward()
            exchange_buffers(net, own[rank])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return net, own


def exchange_buffers(net: nn.Module, others: dict[str, Tensor]) -> None:
    """Swaps the values of the module's buffers with those at hand."""
    for name, buffer in net.named_buffers():
        values = buffer.clone()
        buffer.copy_(others[name])
        others[name] = values


def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler that changes learning rate and momentum."""
    return OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1)


def equal_at_every_stage(subject: Subject) -> None:
    """The plain loop on two ranks; the body of all tests here."""
    axis = Mesh(dp=2).data
    right, buffers = train_plainly(subject, axis.size)
    for stage in STAGES:
        net = subject.build()
        optimizer = make_optimizer(net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, bucket_mb=SMALL)
        assert len(optimizer.units) > 1
        scheduler = schedule(optimizer)
        for step in range(STEPS):
            subject.loss(net, step, axis.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert_equal(net, list(right.parameters()))
        for name, buffer in net.named_buffers():
            torch.testing.assert_close(buffer, buffers[axis.rank][name], rtol=1e-12, atol=1e-14)


def language_models() -> Iterator[Subject]:
    """GPT-2, whose head is its embedding, and Llama with fewer key heads; both ways to compute attention."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    for attention in ("eager", "sdpa"):
        gpt = GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention, **ends,
        )  # fmt: skip
        llama = LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=24, intermediate_size=44,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention,
            **ends,
        )  # fmt: skip
        for kind, config in ((GPT2LMHeadModel, gpt), (LlamaForCausalLM, llama)):
            yield Subject(partial(seeded, kind, config), next_token_loss)


def seeded(kind: Callable[[Any], nn.Module], argument: Any) -> nn.Module:
    """A new module with values from one seed, in float64."""
    torch.manual_seed(5)
    return kind(argument).double()


def next_token_loss(net: nn.Module, step: int, rank: int) -> Tensor:
    """As transformers computes it from labels."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)
    loss: Tensor = net(input_ids=tokens, labels=tokens).loss
    return loss


@pytest.mark.timeout(120)
@pytest.mark.ranks(2, timeout=110, imports=TRANSFORMERS)
def test_gpt2_and_llama_of_transformers() -> None:
    for subject in language_models():
        equal_at_every_stage(subject)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([norm(out), norm(out)])
        self.shortcut = nn.Conv2d(channels, out, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.shortcut(x) + self.norms[1](self.second(inner)))


class ResNet(nn.Module):
    """A small one: [N, 3, 16, 16] to [N, 5]."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), norm(6), nn.ReLU())
        self.blocks = nn.Sequential(Residual(6, 10, norm), Residual(10, 14, norm))
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


def image_loss(net: nn.Module, step: int, rank: int) -> Tensor:
    """Images of another brightness on each rank, so that batch statistics differ."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    images = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64) + rank
    return F.cross_entropy(net(images), torch.randint(5, (4,), generator=generator))


@pytest.mark.ranks(2)
def test_a_residual_network() -> None:
    """With batch statistics, which are a rank's own, and without."""
    for norm in (nn.BatchNorm2d, lambda channels: nn.GroupNorm(2, channels)):
        equal_at_every_stage(Subject(partial(seeded, ResNet, norm), image_loss))
