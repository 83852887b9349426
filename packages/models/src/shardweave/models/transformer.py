"""The transformer: whole in one process, split over a tensor axis, or one part of a pipeline, from one class.

Inside, hidden states are ``[s, b, h]``, sequence first, so that gathering a split sequence is one contiguous
copy::

    tokens [b, s]
      embedding (+ position) (+ embedding_norm)     the part with the embedding
    hidden [s, b, h]   or [s/tp, b, h] with sequence parallelism: also what goes from part to part
                       s is then s/cp of a sequence that is cut over a context axis
      layers.first ... layers.last-1
      norm, head                                    the part with the head
    logits [s, b, vocab/tp]                         with chunked_loss only some tokens' at a time, in loss()

The module tree spells the canonical parameter names, with global layer numbers, in every layout.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shardweave.comm import (
    Axis,
    DropoutStreams,
    all_reduce,
    gather_from,
    name_parameters,
    sharding_of,
    split_sizes,
)
from shardweave.tensor_parallel import (
    Alibi,
    ColumnParallelLinear,
    Losses,
    MixtureOfExperts,
    Overlap,
    Rotary,
    VocabParallelEmbedding,
    check_documents,
    column_linear,
    cut_context,
    document_positions,
    gather_context,
    mark_partial,
    vocab_parallel_cross_entropy,
    vocab_parallel_head_loss,
)

from .block import Block
from .cache import Cache
from .config import TransformerConfig
from .dropout import Masks, streams_from_torch
from .embedding import PositionEmbedding
from .head_z_loss import HeadZLoss, with_gradient_of
from .initialize import initialize_module
from .norms import make_norm
from .parts import Part
from .recompute import Recompute, RecomputeValue
from .routers import MicroBatchRouters, RouterStatistics, routers_of_pass
from .sequence import SequenceCut
from .statistics import Watched
from .token_by_token import lies_batch_first, token_by_token

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """A GPT-style pre-norm transformer after ``config``.

    Args:
        config: the whole model's shape, also for a part.
        tensor: the axis that splits heads, MLP features and vocabulary; ``None``: nothing is split.
        sequence_parallel: whether hidden states between the split layers are split by sequence over
            ``tensor`` (arXiv 2205.05198, section 4.2.2). Has no effect on an axis of one rank.
        keep_inputs: with sequence parallelism, whether layers keep their gathered input for the backward pass and do
            not gather it again: 8 in place of 10 parts of what a block sends, for as much memory as the inputs take.
        decomposed: with sequence parallelism, whether layers compute their products piece by piece while the other
            pieces travel; an :class:`~shardweave.tensor_parallel.Overlap` says it for each product, from its size.
            Experts and a chunked loss do not.
            What comes to experts is kept in any case.
        context: the axis that each sequence is cut over; ``None``: sequences are whole. Tokens and targets are given
            whole to every rank of it, which takes its own (:func:`~shardweave.tensor_parallel.cut_context`). All
            parameters' gradients are recorded as partial over it, but for experts that are spread: theirs are summed
            over ``expert_data``, of which it is a part.
        context_form: how attention spans it, as in :class:`~shardweave.tensor_parallel.ParallelAttention`.
        expert: the axis that experts, if there are some, are spread over (``mesh.ep``); ``None``: this rank has all.
        expert_data: the ranks with the same experts (``mesh.expert_data``); needed with an ``expert`` of several.
        chunked_loss: whether the head and the loss are computed together, for some tokens at a time, so that all logits
            are never there (:func:`~shardweave.tensor_parallel.vocab_parallel_head_loss`). A part with the head then
            ends with hidden states; :meth:`loss` and :meth:`logits` take these. The head's product is made once more.
        recompute: what the backward pass computes again instead of keeping it, a :class:`.Recompute` or what
            :meth:`.Recompute.of` takes: ``"selective"``, ``"full"``, ``{"every": 2}``, ``{"operations": [...]}``.
            Gradients stay the same to the last bit.
        part: what to hold of the model; ``None``: all of it.
        seed: of the initial values, see :meth:`initialize`.
        device: where; ``None``: torch's default device. On ``"meta"`` nothing is allocated nor initialised:
            call ``to_empty`` and :meth:`initialize` later.
        dtype: of the parameters; ``None``: torch's default.

    Building draws nothing from torch's default generator.

    Raises:
        ValueError: when the ranks of ``tensor`` cannot share the heads, ``part`` reaches past the model, or
            ``recompute`` is nothing of these.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tensor: Axis | None = None,
        sequence_parallel: bool = False,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        context: Axis | None = None,
        context_form: Literal["ring", "all-to-all"] = "ring",
        expert: Axis | None = None,
        expert_data: Axis | None = None,
        chunked_loss: bool = False,
        recompute: RecomputeValue = "none",
        part: Part | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.part = part if part is not None else Part.whole(config)
        self.axis = tensor if tensor is not None else Axis.single()
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        self.keep_inputs = keep_inputs and self.sequence_parallel
        self.decomposed = decomposed
        self.context = context if context is not None else Axis.single("cp")
        self.cut = SequenceCut(self.context, self.axis if self.sequence_parallel else Axis.single())
        self.chunked_loss = chunked_loss
        self.recompute = Recompute.of(recompute)
        self._compiled = False
        self._unsplit = self.axis.size == 1
        _check_part(config, self.part)
        if expert is not None and expert.size > 1 and config.experts == 0:
            raise ValueError(
                f"expert={expert!r} for a model without experts; set experts in the config, or leave the axis out"
            )
        self._expert, self._expert_data = expert, expert_data
        self._head_z = HeadZLoss()
        self.watched: Watched | None = None
        """Whom passes tell what their parts put out; see :func:`.watch`."""
        self._build(dtype, context_form)
        mark_partial((p for p in self.parameters() if not _summed_over(p, self.context)), self.context)
        name_parameters(self)
        target = torch.get_default_device() if device is None else torch.device(device)
        if target.type != "meta":
            self.to_empty(device=target)
            self.initialize(seed)

    def _build(self, dtype: torch.dtype | None, context_form: Literal["ring", "all-to-all"]) -> None:
        """Registers this part's modules on the meta device: their own initial draws would be thrown away."""
        config, part, axis = self.config, self.part, self.axis
        sequence_dim = 0 if self.sequence_parallel else None
        partial_over = axis if self.sequence_parallel else None
        meta = torch.device("meta")
        if part.embedding or (part.head and config.tie_embeddings):
            self.embedding = VocabParallelEmbedding(
                config.vocab, config.hidden, axis, sequence_dim=sequence_dim, device=meta, dtype=dtype
            )
        if part.embedding and config.position == "learned":
            self.position = PositionEmbedding(
                config.sequence, config.hidden, partial_over=partial_over, device=meta, dtype=dtype
            )
        if part.embedding and config.embedding_norm:
            self.embedding_norm = make_norm(config, partial_over=partial_over, device=meta, dtype=dtype)
        rotary = _rotary(config) if config.position == "rotary" else None
        alibi = Alibi(config.heads) if config.position == "alibi" else None
        self.layers = nn.ModuleDict()
        for layer in part.layers:
            self.layers[str(layer)] = Block(
                config,
                layer,
                axis,
                rotary=rotary,
                alibi=alibi,
                context=self.context,
                context_form=context_form,
                expert=self._expert,
                expert_data=self._expert_data,
                sequence_dim=sequence_dim,
                keep_inputs=self.keep_inputs,
                decomposed=self.decomposed,
                recompute_core=self.recompute.core,
                device=meta,
                dtype=dtype,
            )
        if part.head:
            self.norm = make_norm(config, partial_over=partial_over, device=meta, dtype=dtype)
        if part.head and not config.tie_embeddings:
            self.head = ColumnParallelLinear(
                config.hidden,
                config.vocab,
                axis,
                bias=False,
                sequence_dim=sequence_dim,
                keep_inputs=self.keep_inputs,
                decomposed=self.decomposed,
                device=meta,
                dtype=dtype,
            )

    def initialize(self, seed: int) -> None:
        """Gives every parameter the value that ``seed`` and its canonical name determine.

        The same in every layout and dtype (up to rounding to it): a float32 tensor of the full shape is drawn
        on the CPU, and this rank's slice of it is kept. A tied head has the embedding's values, in whichever
        part it is.
        """
        initialize_module(self, self.config, seed)

    def compile_blocks(self, **options: Any) -> None:
        """Has ``torch.compile`` take each block, with these ``options`` of it, such as ``backend``.

        Names of parameters stay. What communicates runs as it is written, between graphs, and so do the products; see
        ``eager`` in ``shardweave.tensor_parallel``. With a cache, whose length each token changes, blocks run as
        they are written. Before an optimizer is built that gathers parameters.

        Raises:
            ValueError: when whole blocks run again (``recompute`` other than none and selective).
        """
        if self.recompute.mode not in ("none", "selective"):
            raise ValueError(
                f"compile: with recompute: {self.recompute}: a block that runs again may be given other compiled code "
                "than the first time, which keeps other tensors; use recompute none or selective, or do not compile"
            )
        for block in self.layers.values():
            block.compile(**options)
        self._compiled = True

    def tied_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of which another part holds a copy that has to stay equal.

        Empty when the head is not tied, or embedding and head are both here: then they are one parameter. Where both
        parts are on one rank, :meth:`share_embedding` makes them one.
        """
        if not self.config.tie_embeddings or self.part.embedding == self.part.head:
            return []
        return [("embedding.weight", self.embedding.weight)]

    def share_embedding(self, other: Transformer) -> None:
        """Makes this part's copy of a tied embedding the very parameter of ``other``, a part on the same rank.

        For a rank that holds both ends of the model and not the whole, as the first one of a V-shaped pipeline: two
        copies there would each get half of the gradient. Before an optimizer is built. Nothing is sent.

        Raises:
            ValueError: unless one of the two has the embedding, the other the head, and the config ties them.
        """
        ends = {(part.part.embedding, part.part.head) for part in (self, other)}
        if not self.config.tie_embeddings or ends != {(True, False), (False, True)}:
            raise ValueError(
                f"share_embedding: parts {self.part} and {other.part} with tie_embeddings="
                f"{self.config.tie_embeddings}; it takes the embedding's part and the head's, which are tied"
            )
        self.embedding.weight = other.embedding.weight

    def forward(
        self,
        x: Tensor,
        *,
        streams: DropoutStreams | None = None,
        documents: Tensor | None = None,
        routers: MicroBatchRouters | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Hidden states or, of a part with the head and without ``chunked_loss``, logits.

        ``x``: tokens ``[b, s]`` int64 when the part holds the embedding, else the previous part's hidden
        states ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism); hidden states come out in the same
        shape. Logits are ``[s, b, vocab_r]``: this rank's part of the vocabulary, of the whole sequence. With a
        context axis hidden states and logits are of this rank's ``s / cp`` tokens; tokens are whole. With
        ``chunked_loss`` what comes out of the last part are hidden states, too, normed ones. In memory the batch may be
        first in all of them, as it is on a CPU where the tensor axis has one rank.

        ``streams``: the keys of the dropout masks, for masks that are the same in every layout. Without them,
        in training, a seed is drawn from torch's default generator (and shared over the tensor axis); then
        ranks that hold different samples have to be seeded differently. In evaluation nothing is dropped, nor
        drawn.

        ``documents``: ``[b, s]`` integers, on every part and rank of the whole rows, where rows hold several documents:
        tokens see those of their own number only, and learned positions start again with each. Labels are the
        caller's: see :func:`~shardweave.tensor_parallel.document_targets`.

        ``routers``: of a model with experts, what their losses are multiplied by, and where what they did is noted
        (:class:`.StepRouters`). In evaluation nothing is noted.

        ``cache``: of this rank's parts (:func:`.make_cache`); ``x`` are the tokens behind those in it, and are added to
        it. In evaluation, without autograd. ``last_only``: a part with the head gives the last token's output alone,
        ``[1, b, ...]``; on other parts it changes nothing.

        Raises:
            ValueError: for an ``x`` of another shape, and in training for a config with losses of routers and no
                ``routers`` that would say how they count; for a ``cache`` that ``x`` does not fit into, or that goes
                with something whose tokens cannot be taken one after the other, which the text names.
        """
        sequence, batch = self._measure(x, cache)
        self._check_pieces(documents, cache, last_only)
        routers = routers_of_pass(self.config, routers, training=self.training)
        if documents is not None:
            check_documents(documents, (batch, sequence))
        local = self.cut.positions(sequence, x.device)
        masks = self._masks(streams, sequence, batch, local)
        if self.part.embedding:
            x = self._embed(x, local, masks, documents, cache)
        with self._as_written(cache):
            for layer, block in zip(self.part.layers, self.layers.values(), strict=True):
                kept = None if cache is None else cache.layers[layer]
                x = self.recompute.run(block, layer, x, masks, documents, routers, kept)
                self._note(f"layers.{layer}", x)
        if not self.part.head:
            return x
        x = token_by_token(self.norm, x[-1:] if last_only else x)
        self._note("norm", x)
        return x if self.chunked_loss else self._head(x)

    def loss(self, output: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """The SUM of the cross entropies of all valid tokens, 0-d, in float32 or wider, equal on all tensor
        ranks; with a context axis of this rank's own tokens.

        ``output`` is what :meth:`forward` gave, logits ``[s, b, vocab_r]`` or, with ``chunked_loss``, hidden states;
        ``targets`` ``[b, s]`` int64, ``ignore_index`` where there is none. Divide by the number of valid tokens of the
        whole global batch: a mean taken here would weigh short micro-batches too much. Without any valid token the loss
        is 0, and so are the gradients.

        With ``config.head_z_loss``, in training, the gradient is that of the loss and of the z-loss, but what is
        returned is the loss alone (:meth:`take_head_z_loss` has the other).
        """
        ranks = self.cut.ranks if self.chunked_loss else self.context.size
        if targets.dim() != 2 or (output.shape[0] * ranks, output.shape[1]) != targets.t().shape:
            what, width = ("hidden states", "h") if self.chunked_loss else ("logits", "vocab")
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} for {what} of shape {tuple(output.shape)}: "
                f"targets are [b, s] where {what} are [s{f' / {ranks}' if ranks > 1 else ''}, b, {width}]"
            )
        own = cut_context(targets, self.context, 1).t()
        if self._unsplit and lies_batch_first(output):
            output, own = output.transpose(0, 1), own.t()
        z = self.config.head_z_loss if self.training else 0.0
        each = self._losses(output, own, ignore_index, z)
        if not z:
            return each.loss.sum()
        z_loss = each.z_loss.sum()
        self._head_z.note(z_loss, z)
        return with_gradient_of(each.loss.sum(), z_loss)

    def _losses(self, output: Tensor, own: Tensor, ignore_index: int, z: float) -> Losses:
        """Of each token of ``own`` targets, ``[s, b]``."""
        size = self.config.vocab
        if not self.chunked_loss:
            return vocab_parallel_cross_entropy(
                output, own, self.axis, vocab_size=size, ignore_index=ignore_index, z_loss=z, parts=True
            )
        return vocab_parallel_head_loss(
            output,
            self.embedding.weight if self.config.tie_embeddings else self.head.weight,
            own,
            self.axis,
            vocab_size=size,
            sequence_dim=0 if self.sequence_parallel else None,
            ignore_index=ignore_index,
            z_loss=z,
            parts=True,
        )

    def take_head_z_loss(self) -> Tensor:
        """The sum of ``logsumexp(logits)^2`` over the valid tokens that :meth:`loss` has seen in training since the
        last call.

        0-d float64, equal on all tensor ranks; with a context axis of this rank's own tokens; 0 without
        ``config.head_z_loss``, and of a part without the head. ``head_z_loss`` times its mean was added to what was
        trained on.
        """
        device = next((parameter.device for parameter in self.parameters()), "cpu")
        return self._head_z.take(device)

    def logits(self, output: Tensor) -> Tensor:
        """This rank's logits ``[s, b, vocab_r]``, from what :meth:`forward` gave: these themselves, or hidden states
        with ``chunked_loss``, of which :meth:`loss` does not make all logits at once."""
        return self._head(output) if self.chunked_loss else output

    def gather_logits(self, output: Tensor, position: int | None = None) -> Tensor:
        """All logits ``[s, b, vocab]`` on every rank of the tensor and context axes, from what :meth:`forward` gave
        each; ``position``: of this token of the sequence alone, ``[1, b, vocab]``, without a gradient."""
        words = self.logits(output)
        sizes = split_sizes(self.config.vocab, self.axis.size)
        if position is None:
            return gather_context(gather_from(words, self.axis, -1, sizes), self.context, 0)
        # One context rank has the token; nothing is added to what it says.
        words = words.detach()
        own = cut_context(torch.arange(len(words) * self.context.size), self.context, 0) == position
        here = words[own.to(words.device)].sum(0, keepdim=True)
        return gather_from(all_reduce(here, self.context), self.axis, -1, sizes)

    @torch.no_grad()
    def move_router_biases(self, statistics: RouterStatistics, rate: float) -> None:
        """Makes experts that had fewer tokens than the mean more likely, and others less; see ``TopKRouter.move_bias``.

        Of this part's layers; to be called on every rank, after a step that was taken (not after one that was skipped).
        Nothing is sent.

        Raises:
            ValueError: when the config has no ``router_bias``.
        """
        if not self.config.router_bias:
            raise ValueError("move_router_biases: the config has no router_bias; set it, or do not call this")
        for layer, block in zip(self.part.layers, self.layers.values(), strict=True):
            router = cast(MixtureOfExperts, block.mlp).router
            router.move_bias(statistics.counts[layer].to(router.weight.device), rate)

    def _note(self, name: str, x: Tensor) -> None:
        """Tells who watches, if somebody does, what a part puts out, of the tokens that this rank counts."""
        if self.watched is not None and (self.axis.is_first or self.sequence_parallel):
            self.watched.note(name, x)

    def _measure(self, x: Tensor, cache: Cache | None) -> tuple[int, int]:
        """Length of the whole sequence and batch size of ``x``, checked; with a cache, of what is new of it."""
        if self.part.embedding:
            if x.dim() != 2 or x.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"tokens are [b, s] integers, not {tuple(x.shape)} of {x.dtype}")
            batch, sequence = x.shape
            self.cut.check(sequence)
        else:
            if x.dim() != 3 or x.shape[-1] != self.config.hidden:
                raise ValueError(f"hidden states are [s, b, {self.config.hidden}], not {tuple(x.shape)}")
            sequence, batch = x.shape[0] * self.cut.ranks, x.shape[1]
        if cache is not None:
            cache.check(self.part, batch, sequence)
        before = cache.embedded if cache is not None and self.part.embedding else 0
        if self.config.position == "learned" and before + sequence > self.config.sequence:
            raise ValueError(
                f"{before + sequence} tokens, but there are learned positions for {self.config.sequence}; "
                "shorten the input or raise sequence"
            )
        return sequence, batch

    def _as_written(self, cache: Cache | None) -> AbstractContextManager[object]:
        """With a cache, compiled blocks are not run as such: each token would be compiled anew."""
        if cache is None or not self._compiled:
            return nullcontext()
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance

    def _check_pieces(self, documents: Tensor | None, cache: Cache | None, last_only: bool) -> None:
        """Refuses what needs whole sequences where they are given in pieces, or their last token is asked for."""
        what = "cache" if cache is not None else "last_only"
        if cache is None and not last_only:
            return
        if self.cut.given is not None:
            raise ValueError(
                f"{what}: {self.cut.given} cuts the sequence over ranks; build the model without it"
            )
        if cache is None:
            return
        if self.training:
            raise ValueError(
                "cache: the model is in training mode, where it would see other tokens; call eval()"
            )
        if documents is not None:
            raise ValueError("cache: documents are given; give each document a row and a cache of its own")
        if self.config.expert_capacity is not None:
            raise ValueError(
                f"cache: expert_capacity {self.config.expert_capacity} lets tokens of a whole sequence compete for "
                "experts, so a token cannot be computed without the others; leave the cache out"
            )

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        """Where in the whole sequence the ``length`` tokens are whose hidden states this rank holds between the layers.

        int64 ``[length]``, ascending; all of ``0 .. length - 1`` when nothing cuts the sequence.
        """
        return self.cut.positions(length * self.cut.ranks, device)

    def _masks(self, streams: DropoutStreams | None, sequence: int, batch: int, local: Tensor) -> Masks:
        """The dropout masks of this pass."""
        device = local.device
        drops = self.training and (self.config.dropout > 0 or self.config.attention_dropout > 0)
        if streams is None:
            streams = streams_from_torch(batch, (self.axis, self.context), device) if drops else None
        elif streams.samples.shape != (batch,):
            raise ValueError(
                f"streams: samples of shape {tuple(streams.samples.shape)} for a micro-batch of {batch}; give the "
                "global number of each sample"
            )
        else:
            streams = replace(streams, samples=streams.samples.to(device))
        return Masks(
            streams if drops else None,
            hidden=self.config.dropout,
            attention=self.config.attention_dropout,
            positions=torch.arange(sequence, device=device),
            local=local,
        )

    def _embed(
        self, tokens: Tensor, local: Tensor, masks: Masks, documents: Tensor | None, cache: Cache | None
    ) -> Tensor:
        before = 0 if cache is None else cache.embedded
        own = cut_context(tokens, self.context, 1)
        # [b, s] -> [s, b, h], or this rank's [s/tp, b, h]
        batch_first = self._unsplit and own.device.type == "cpu"  # see token_by_token.py
        x: Tensor = self.embedding(own).transpose(0, 1) if batch_first else self.embedding(own.t())
        self._note("embedding", x)
        if self.config.position == "learned" and documents is not None:
            x = self.position(x, positions=document_positions(documents).t()[local])
        elif self.config.position == "learned" and self.context.size > 1:
            x = self.position(x, positions=local)
        elif self.config.position == "learned":
            x = self.position(x, before + self.cut.shared.rank * len(local))
        if self.config.position == "learned":
            self._note("position", x)
        if self.config.embedding_norm:
            x = token_by_token(self.embedding_norm, x)
            self._note("embedding_norm", x)
        if cache is not None:
            cache.embedded += len(local)
        return masks.drop(x, 0, "embedding")

    def _head(self, x: Tensor) -> Tensor:
        return token_by_token(self._products_with_words, x) if self._unsplit else self._products_with_words(x)

    def _products_with_words(self, x: Tensor) -> Tensor:
        if self.config.tie_embeddings:
            decomposed = self.decomposed
            if isinstance(decomposed, Overlap):
                decomposed = decomposed.of_column(x, self.config.vocab, self.axis)
            return column_linear(
                x,
                [self.embedding.weight],
                [None],
                self.axis,
                sequence_dim=0 if self.sequence_parallel else None,
                keep_inputs=self.keep_inputs,
                decomposed=decomposed,
            )
        logits: Tensor = self.head(x)
        return logits


def _rotary(config: TransformerConfig) -> Rotary:
    return Rotary(
        config.head_size,
        base=config.rotary_base,
        fraction=config.rotary_fraction,
        scaling=config.rotary_scaling,
    )


def _check_part(config: TransformerConfig, part: Part) -> None:
    if part.last > config.layers:
        raise ValueError(
            f"part: it ends with block {part.last - 1}, but the model has {config.layers}; the last is "
            f"{config.layers - 1}"
        )


def _summed_over(parameter: nn.Parameter, axis: Axis) -> bool:
    """Whether its record names the axis that its gradient is summed over, and that includes ``axis``."""
    reduced = sharding_of(parameter).reduced
    return reduced is not None and reduced.contains(axis)
