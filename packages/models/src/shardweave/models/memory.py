"""Bytes that one rank holds, by kind, before anything is allocated.

Parameters, gradients and optimizer state are exact (a test compares them with real tensors). Activations are what
this package's own layers keep for the backward pass, term by term; tests compare them with what autograd is seen to
keep, and with what is alive. Where blocks are computed again, what one of them has while its backward runs comes on
top. Not in it: buffers that live for a moment (a gathered sequence, a layer's gradient, what a kernel borrows), those
of communication, and what an allocator wastes. Measure before you fill the last tenth.

The known formulas (Korthikanti et al., arXiv 2205.05198, section 4: ``s b h (10 + 24/t + 5 a s/(h t))`` and its kin)
count 16-bit numbers, dropout masks and a written-out attention; here dropout and the attention core are counted as
they are used, in any dtype, for gated MLPs and grouped queries, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from shardweave.tensor_parallel import ATTENTION, LINEAR

from .config import TransformerConfig
from .parts import Part
from .recompute import Recompute, RecomputeValue
from .shapes import local_shape, parameter_shapes

__all__ = ["MemoryUse", "RankLayout", "memory"]

_INDEX = 8  # bytes of an int64
_FLAG = 1  # bytes of a bool
_KEY = 4  # bytes of what a token's mask of dropout is keyed by
_CHUNK = 1 << 26  # logits at once with a chunked loss on an accelerator, and more than on a CPU


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """What decides how much of a model one rank holds."""

    part: Part | None = None
    """The rank's pipeline stage; ``None``: the whole model."""

    shared_embedding: bool = False
    """Whether a tied head is one parameter with the embedding in another part on the rank, and counts there
    (:meth:`.Transformer.share_embedding`)."""

    tensor: int = 1
    """Size of the tensor axis."""

    tensor_rank: int = 0
    """Position on it; the first has the most where sizes do not divide."""

    sequence_parallel: bool = False
    """Whether hidden states are split over the tensor axis between the layers."""

    keep_inputs: bool = False
    """With sequence parallelism, whether layers keep their gathered input."""

    chunked_loss: bool = False
    """Whether head and loss are computed for some tokens at a time."""

    context: int = 1
    """Size of the context axis, over which sequences are cut."""

    context_form: Literal["ring", "all-to-all"] = "ring"
    """How attention spans it."""

    expert: int = 1
    """Ranks that experts are spread over, inside the data axis (``mesh.ep``)."""

    data: int = 1
    """Ranks that states are sharded over: the data axis, times the context axis. Those of experts are sharded over
    ``expert`` times fewer."""

    zero_stage: int = 0
    """0: everything whole; 1: optimizer state sharded over ``data``; 2: gradients, too; 3: and parameters."""

    whole_gradients: bool = False
    """Whether gradients stay whole until the step although the stage could shard them before."""

    def elements(self, config: TransformerConfig) -> int:
        """Of the parameters that the rank has of ``part``, before ZeRO shards them."""
        return sum(self._counts(config).values())

    def _counts(self, config: TransformerConfig) -> dict[bool, int]:
        """The same by whether they are experts'."""
        counts = {False: 0, True: 0}
        for entry in parameter_shapes(config, self.part):
            if not (self.shared_embedding and entry.name == "embedding.weight"):
                shape = local_shape(entry, self.tensor, self.tensor_rank, self.expert)
                counts[entry.stacked] += math.prod(shape)
        return counts


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank, at the end of a backward pass, when most is held."""

    parameters: int
    """In the dtype the model computes with. At stage 3 what is gathered at a time comes on top."""

    gradients: int
    """Whole gradients below stage 2, of which the reduced ones are a part, and from there on reduced shards. A unit or
    two on the way to be reduced come on top."""

    optimizer: int
    """Adam's two moments, and the float32 master copy of narrower parameters."""

    activations: int
    """Kept from forward to backward for all micro-batches in flight, and what one has beside it in its backward pass:
    the gradient of its logits, or what a block computes again."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory(
    config: TransformerConfig,
    *,
    layout: RankLayout | None = None,
    dtype: torch.dtype = torch.float32,
    micro_batch: int = 1,
    sequence: int | None = None,
    in_flight: int = 1,
    gradients: torch.dtype | None = None,
    recompute: RecomputeValue = "none",
) -> MemoryUse:
    """What one rank of ``layout`` holds while training ``config`` with AdamW.

    ``dtype``: of the parameters; ``gradients``: of theirs (default: float32 or wider, in which ZeroOptimizer keeps
    masters and moments in any case).
    ``micro_batch``: sequences; ``sequence``: tokens of each (default: the config's). ``in_flight``: micro-batches
    whose activations are held at once, a schedule's peak for the stage. ``recompute``: as :meth:`.Recompute.of` takes
    it; of the covered blocks is kept, with ``t`` the tokens of a micro-batch on this rank:

    - ``full``: what comes in, ``t h`` numbers;
    - ``selective``: all but the core's inside (of a core that is written out, ``3 s`` numbers for each head and token);
    - ``operations``: what comes in, and what the products and the core that are kept give.
    """
    where = layout if layout is not None else RankLayout()
    wide = torch.promote_types(dtype, torch.float32).itemsize
    counts = where._counts(config)
    count = shard = sum(counts.values())
    if where.zero_stage > 0:
        shard = math.ceil(counts[False] / where.data) + math.ceil(counts[True] * where.expert / where.data)
    sharded = where.zero_stage >= 2 and not where.whole_gradients
    master = wide if dtype.itemsize < wide else 0
    length = config.sequence if sequence is None else sequence
    kept = _Kept(config, where, micro_batch, length, dtype.itemsize, wide, Recompute.of(recompute))
    return MemoryUse(
        parameters=(shard if where.zero_stage == 3 else count) * dtype.itemsize,
        gradients=(shard if sharded else count) * (wide if gradients is None else gradients.itemsize),
        optimizer=shard * (2 * wide + master),
        activations=in_flight * kept.micro_batch() + kept.constants() + kept.backward(),
    )


class _Kept:
    """Bytes that one micro-batch leaves on a rank for its backward pass, place by place.

    ``element``: bytes of an activation; ``wide``: of a statistic.
    """

    def __init__(
        self,
        config: TransformerConfig,
        where: RankLayout,
        batch: int,
        length: int,
        element: int,
        wide: int,
        recompute: Recompute,
    ) -> None:
        self.recompute = recompute
        self.config, self.batch, self.length, self.element, self.wide = config, batch, length, element, wide
        self.part = where.part if where.part is not None else Part.whole(config)
        self.split = where.tensor > 1
        self.context = where.context
        self.exchanged = where.context > 1 and where.context_form == "all-to-all"
        self.tokens = batch * length // where.context
        self.local_tokens = self.tokens // where.tensor if where.sequence_parallel else self.tokens
        self.chunked = where.chunked_loss
        self.keeps_inputs = where.keep_inputs
        self.several_senders = where.expert > 1 or (self.split and where.sequence_parallel)
        local = {
            entry.name.removeprefix(f"layers.{self.part.first}."): local_shape(
                entry, where.tensor, where.tensor_rank
            )
            for entry in parameter_shapes(config, self.part)
        }
        self.query = config.query_size // where.tensor
        self.heads = config.heads // where.tensor
        self.kv = max(config.num_kv_heads // where.tensor, 1) * config.head_size
        self.ffn = local["mlp.up.weight"][-2] if self.part.layers else 0
        self.vocab = local[self.head_name][0] if self.part.head else 0

    @property
    def head_name(self) -> str:
        return "embedding.weight" if self.config.tie_embeddings else "head.weight"

    def micro_batch(self) -> int:
        covered = self.covered
        total = covered * self.covered_block() + (len(self.part.layers) - covered) * self.block()
        if self.part.embedding:
            total += self.embedding()
        if self.part.head:
            total += self.head()
        if covered and not self.recompute.core:
            # Positions of a row and of its part here, for masks of dropout.
            total += (self.length + self.tokens // self.batch) * _INDEX
        return total

    def backward(self) -> int:
        """What comes on top while a micro-batch goes back: its logits' gradient; later a block that runs again."""
        again = self.again() if self.covered else 0
        # By then what the head kept is gone.
        return max(self.logits(), again - (self.head() if self.part.head else 0))

    @property
    def covered(self) -> int:
        """Blocks that compute something again."""
        return sum(map(self.recompute.covers, self.part.layers))

    def covered_block(self) -> int:
        """A block that computes something again, from its forward to its backward."""
        if self.recompute.core:
            return self.block() - self.inside()
        return self.hidden() + self.results(of_block=False) + (self.keys() if self.context > 1 else 0)

    def again(self) -> int:
        """What such a block has more while its backward runs."""
        if self.recompute.core:
            return self.inside()
        return self.block() - self.hidden() - self.results(of_block=True)

    def inside(self) -> int:
        """Of :meth:`attention`, what is neither an input of the core nor its output as the projection takes it."""
        new, _ = self._turned()
        fused = self.query + 2 * self.kv
        rows = self.attention_rows() - self.heads
        return self.attention() - self.tokens * ((fused + new + self.query) * self.element + rows * self.wide)

    def results(self, *, of_block: bool) -> int:
        """Results that a block keeps although it is computed again; ``of_block``: those that :meth:`block` counts."""
        config, total = self.config, 0
        if LINEAR in self.recompute.kept:
            total += self.tokens * (self.query + 2 * self.kv) * self.element  # queries, keys and values
            total += self.fed_forward_results(of_block=of_block)
            if not of_block:  # of the attention's output; of an MLP's
                total += (1 if config.experts else 2) * self.hidden()
            if self.keeps_inputs:
                total += (1 if config.experts else 2) * self.inputs()
        if ATTENTION in self.recompute.kept:
            total += self.core_results(of_block=of_block)
        return total

    def constants(self) -> int:
        """ALiBi's mask, which all blocks and micro-batches share; over a context axis it is made anew for each."""
        if self.config.position != "alibi" or not self.part.layers or self.context > 1:
            return 0
        return self.heads * self.length**2 * self.element

    def logits(self) -> int:
        """This rank's logits of one micro-batch, or their gradient; as many as there are at once."""
        most = _CHUNK // max(self.vocab, 1) if self.chunked else self.tokens
        return min(self.tokens, max(most, 1)) * self.vocab * self.element

    def embedding(self) -> int:
        places = _INDEX + (_FLAG if self.split else 0)
        norm = self.norm() if self.config.embedding_norm else 0
        return self.tokens * places + norm + self.dropout()

    def block(self) -> int:
        fed_forward = self.experts() + self.hidden() if self.config.experts else self.mlp() + self.inputs()
        normed = 2 * self.norm() - (
            self.hidden() if self.config.parallel_residual else 0
        )  # both norm the same
        return self.attention() + self.keys() + self.inputs() + fed_forward + normed + 2 * self.dropout()

    def keys(self) -> int:
        """What masks of the attention's dropout depend on, of all tokens, where the core is computed from it again."""
        again = self.recompute.core or self.context > 1
        return self.batch * self.length * _KEY if again and self.config.attention_dropout else 0

    def head(self) -> int:
        # Of the loss: the target and whether it is here and valid; the maximum, and two sums.
        loss = self.tokens * (_INDEX + 2 * _FLAG + 3 * self.wide)
        if self.chunked:
            return self.norm() + self.hidden() + loss
        return self.norm() + self.inputs() + self.logits() + loss

    def hidden(self) -> int:
        return self.local_tokens * self.config.hidden * self.element

    @property
    def statistics(self) -> int:
        """Numbers a norm keeps of each row."""
        return 2 if self.config.norm == "layernorm" else 1

    def norm(self) -> int:
        """Input and statistics: mean and deviation, or the root mean square."""
        return self.hidden() + self.local_tokens * self.statistics * self.wide

    def inputs(self) -> int:
        """What comes out of a norm and goes into the products behind it, as they keep it."""
        return self.tokens * self.config.hidden * self.element if self.keeps_inputs else self.hidden()

    def dropout(self) -> int:
        return self.local_tokens * self.config.hidden * _FLAG if self.config.dropout else 0

    def attention(self) -> int:
        """Queries, keys, values, what the core makes of them, and the heads' outputs side by side."""
        turned, normed = self.config.position == "rotary", self.config.qk_norm
        new, copied = self._turned()
        fused, rows = self.query + 2 * self.kv, self.attention_rows()
        if self.context > 1:
            return self.tokens * (self._over_context(new, copied=copied) * self.element + rows * self.wide)
        if self.config.attention_dropout:
            # Written out: keys and values are repeated for each query head, and products copy what is strided.
            scores = self.tokens * self.heads * self.length * (self.wide + _FLAG + self.element)
            if self.config.position != "alibi":
                scores += self.length**2 * _FLAG  # which keys come later
            queries = self.query if turned or self.batch > 1 else fused
            if normed:  # whose norms keep what they were given
                queries = fused + self.query
            statistics = self.tokens * (rows - self.heads) * self.wide
            return scores + self.tokens * (queries + 3 * self.query) * self.element + statistics
        # torch's fused core keeps its inputs, its output and one number a row.
        elements = fused + new + (2 if copied else 1) * self.query
        return self.tokens * (elements * self.element + rows * self.wide)

    def attention_rows(self) -> int:
        """Rows of a token of which one number is kept: each head's in the core, and statistics of its norms."""
        norms = self.statistics * (self.heads + self.kv // self.config.head_size)
        return self.heads + (norms if self.config.qk_norm else 0)

    def _turned(self) -> tuple[int, bool]:
        """Elements of a token in new tensors, which normed or turned queries and keys are; and whether the output,
        which comes in their order, is copied once more, as it is but for that of the RMS norm."""
        turned, normed = self.config.position == "rotary", self.config.qk_norm
        new = self.query + self.kv if turned or normed else 0
        return new, turned or (normed and self.config.norm == "layernorm")

    def core_results(self, *, of_block: bool) -> int:
        """What the core's operations give: the output and one number a row; written out, scores and output."""
        if self.config.attention_dropout and self.context == 1:
            scores = 0 if of_block else self.tokens * self.heads * self.length * self.element
            return scores + self.tokens * self.query * self.element
        return self.tokens * (self.query * self.element + self.heads * self.wide)

    def fed_forward_results(self, *, of_block: bool) -> int:
        """What the products of the MLP that go up give; of experts what all of theirs give."""
        config = self.config
        up = self.ffn * (2 if config.gated else 1)
        if of_block and config.activation == "relu":
            up = 0  # which keeps its output alone
        if not config.experts:
            return self.tokens * up * self.element
        return self.expert_rows() * (config.hidden + up) * self.element

    def _over_context(self, new: int, *, copied: bool) -> int:
        """Elements of a token that attention over a context axis keeps, in either form; scores are computed again.

        The exchange makes new tensors of everything, with as many key/value heads as all ranks' queries read; what was
        exchanged is kept by norms only.
        """
        fused = self.query + 2 * self.kv
        if self.exchanged:
            heads = self.kv // self.config.head_size
            kept = fused if self.config.qk_norm else 0
            return kept + 3 * self.query + 2 * self.kv * math.lcm(heads, self.context) // heads
        # Written out, with dropout, the core's output is in another order, too.
        copied = copied or self.config.attention_dropout > 0
        return fused + new + (2 if copied else 1) * self.query

    def mlp(self) -> int:
        return self.tokens * self.ffn * self.widths * self.element

    @property
    def widths(self) -> int:
        """What goes into the activation (gate and up, if there are two) and what comes out of it, from which relu
        knows enough of what went in."""
        return {"swiglu": 3, "relu": 1}.get(self.config.activation, 2)

    def experts(self) -> int:
        """The router, then rows as :meth:`mlp` for each choice, as if all experts and ranks had as many.

        A row is kept as it comes to its expert and as it comes back.
        """
        config, k = self.config, self.config.experts_per_token
        here, there = round(self.local_tokens * k * self.taken), self.expert_rows()
        chosen = self.local_tokens * (
            config.experts * (_INDEX + 2 * self.wide) + k * (self.wide + self.element)
        )
        if self.element < self.wide:
            # The router multiplies wide copies, in place of what the norm made: the rows are copies, too.
            chosen += self.local_tokens * config.hidden * (self.wide - self.element)
            chosen += config.experts * config.hidden * self.wide
        rows = there * (config.hidden + self.ffn * self.widths) * self.element
        back = self.local_tokens * k * config.hidden * self.element
        if config.expert_capacity is not None:
            # As they are before zeros are put between them.
            back += here * (config.hidden * self.element + _INDEX)
        orders = here + (there if self.several_senders else 0)
        return chosen + rows + back + orders * _INDEX

    @property
    def taken(self) -> float:
        """Of all choices of experts, those that there is room for, at most."""
        return min(1.0, self.config.expert_capacity or 1.0)

    def expert_rows(self) -> int:
        """Rows that come to this rank's experts, if all ranks' have as many."""
        return round(self.tokens * self.config.experts_per_token * self.taken)
