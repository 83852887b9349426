"""All layers together, on eight ranks, with sizes that eight does not divide, against torch's own modules.

Hidden 7, vocabulary 13, feed-forward 19; eight query heads on two key/value heads, of which four ranks each hold a
copy. Two steps of Adam, after which every copy of a parameter has the same bits.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import F64, assert_same_training, values
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    FusedColumnLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    mark_partial,
    vocab_parallel_cross_entropy,
    vocab_parallel_head_loss,
)

HIDDEN, VOCAB, INNER, HEADS, KV_HEADS, HEAD_DIM = 7, 13, 19, 8, 2, 3
SEQUENCE, BATCH = 16, 2
TOKENS = torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) * 5 % VOCAB
TARGETS = TOKENS.roll(-1, 0).masked_fill(TOKENS == 4, -100)


class WholeAttention(nn.Module):
    """Grouped-query attention of ``[s, b, h]``."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_DIM, dtype=F64)
        self.key = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, dtype=F64)
        self.value = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, dtype=F64)
        self.output = nn.Linear(HEADS * HEAD_DIM, HIDDEN, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).permute(1, 2, 0, 3)
            for layer in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.output(mixed.permute(2, 0, 1, 3).flatten(2))
        return y


class WholeGate(nn.Module):
    """Gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INNER, dtype=F64), nn.Linear(HIDDEN, INNER, dtype=F64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x), self.up(x)


class Net(nn.Module):
    """A transformer of one block around the given layers."""

    def __init__(
        self, embedding: nn.Module, attention: nn.Module, gate: nn.Module, down: nn.Module, head: nn.Module
    ) -> None:
        super().__init__()
        self.embedding, self.attention, self.gate, self.down, self.head = (
            embedding,
            attention,
            gate,
            down,
            head,
        )
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, dtype=F64) for _ in range(2))

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads."""
        x: Tensor = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        gate, up = self.gate(self.norms[1](x))
        x = x + self.down(F.silu(gate) * up)
        return x


def whole() -> Net:
    torch.manual_seed(3)
    return Net(
        nn.Embedding(VOCAB, HIDDEN, dtype=F64),
        WholeAttention(),
        WholeGate(),
        nn.Linear(INNER, HIDDEN, dtype=F64),
        nn.Linear(HIDDEN, VOCAB, dtype=F64),
    )


def split(axis: Axis, sequence_dim: int | None, keep_inputs: bool) -> Net:
    torch.manual_seed(3)
    net = Net(
        VocabParallelEmbedding(VOCAB, HIDDEN, axis, sequence_dim=sequence_dim, dtype=F64),
        ParallelAttention(
            HIDDEN,
            HEADS,
            axis,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            sequence_dim=sequence_dim,
            keep_inputs=keep_inputs,
            dtype=F64,
        ),
        FusedColumnLinear(
            HIDDEN,
            {"gate": INNER, "up": INNER},
            axis,
            sequence_dim=sequence_dim,
            keep_inputs=keep_inputs,
            dtype=F64,
        ),
        RowParallelLinear(INNER, HIDDEN, axis, sequence_dim=sequence_dim, dtype=F64),
        ColumnParallelLinear(
            HIDDEN, VOCAB, axis, sequence_dim=sequence_dim, keep_inputs=keep_inputs, dtype=F64
        ),
    )
    if sequence_dim is not None:
        mark_partial(net.norms, axis)
    return net


@pytest.mark.ranks(8)
def test_a_model_of_odd_sizes_trains_like_one_process() -> None:
    axis = Mesh(tp=8).tp
    weights = values(SEQUENCE, BATCH, seed=2)
    for sequence_dim, keep_inputs, chunked in (
        (None, False, False),
        (None, False, True),
        (0, False, False),
        (0, True, False),
        (0, False, True),
    ):
        net, reference = split(axis, sequence_dim, keep_inputs), whole()
        head = net.head
        assert isinstance(head, ColumnParallelLinear)

        def split_step(
            net: Net = net,
            head: ColumnParallelLinear = head,
            sequence_dim: int | None = sequence_dim,
            chunked: bool = chunked,
        ) -> Tensor:
            x = net.hidden(TOKENS)
            if chunked:
                loss = vocab_parallel_head_loss(
                    x,
                    head.weight,
                    TARGETS,
                    axis,
                    vocab_size=VOCAB,
                    bias=head.bias,
                    sequence_dim=sequence_dim,
                    label_smoothing=0.1,
                    chunk=5,
                )
            else:
                loss = vocab_parallel_cross_entropy(
                    head(x), TARGETS, axis, vocab_size=VOCAB, label_smoothing=0.1
                )
            (loss * weights).sum().backward()
            return loss.detach()

        def reference_step(reference: Net = reference) -> Tensor:
            logits = reference.head(reference.hidden(TOKENS)).flatten(0, 1)
            loss = F.cross_entropy(logits, TARGETS.flatten(), reduction="none", label_smoothing=0.1)
            loss = loss.view(SEQUENCE, BATCH)
            (loss * weights).sum().backward()
            return loss.detach()

        assert_same_training(net, reference, axis, split_step, reference_step)
