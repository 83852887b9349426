"""The estimate against tensors that are really there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from packages.models.tests.reference import FAMILIES, MIXTURES
from torch import Tensor

from shardweave.comm import Axis, DropoutStreams, Mesh
from shardweave.models import (
    Part,
    RankLayout,
    StepRouters,
    Transformer,
    TransformerConfig,
    memory,
    parts_from_ranges,
    preset,
)
from shardweave.tensor_parallel import head_loss

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _larger(family: str) -> TransformerConfig:
    config = {**FAMILIES, **MIXTURES}[family]
    return replace(config, hidden=64, heads=8, head_dim=None, ffn=None, vocab=101, sequence=32)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_real_tensors(family: str) -> None:
    """Float32, AdamW, one rank: parameters, gradients and moments byte for byte."""
    config = _larger(family)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model.loss(model(tokens), tokens).backward()
    optimizer.step()
    use = memory(config)
    assert use.parameters == sum(p.nbytes for p in model.parameters())
    assert use.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = [state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert use.optimizer == sum(moments)
    assert use.total == use.parameters + use.gradients + use.optimizer + use.activations


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_states_of_split_models_are_those_of_real_tensors(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for config in FAMILIES.values():
        for part in (None, *parts_from_ranges(config, [range(2), range(2, 4)])):
            model = Transformer(config, tensor=axis, part=part)
            layout = RankLayout(part=part, tensor=ranks, tensor_rank=axis.rank)
            assert memory(config, layout=layout).parameters == sum(p.nbytes for p in model.parameters())


def test_zero_shards_as_its_paper_says() -> None:
    """Rajbhandari et al. (arXiv 1910.02054, section 3), with float32 gradients, then in 16 bits as there.

    2 + 4 + 12, then 12/N, then 4/N, then 2/N; whole gradients kept at stage 2 are those of stage 1.
    """
    config = preset("gpt2")
    count = 124_439_808
    shard = -(-count // 64)
    for gradients, size in ((None, 4), (torch.bfloat16, 2)):
        uses = [
            memory(
                config,
                layout=RankLayout(data=64, zero_stage=stage),
                dtype=torch.bfloat16,
                gradients=gradients,
            )
            for stage in range(4)
        ]
        assert [(use.parameters, use.gradients, use.optimizer) for use in uses] == [
            (2 * count, size * count, 12 * count),
            (2 * count, size * count, 12 * shard),
            (2 * count, size * shard, 12 * shard),
            (2 * shard, size * shard, 12 * shard),
        ]
    whole = RankLayout(data=64, zero_stage=2, whole_gradients=True)
    assert memory(config, layout=whole) == memory(config, layout=RankLayout(data=64, zero_stage=1))
    assert memory(config, layout=RankLayout(zero_stage=2)) == memory(config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "dropout"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_autograd_keeps(family: str, dropout: float, dtype: torch.dtype) -> None:
    config = replace(_larger(family), dropout=dropout)
    if config.position != "alibi":  # whose mask is there, but not kept by autograd, in the written-out core
        config = replace(config, attention_dropout=dropout)
    for batch in (1, 3):
        _expect_activations(config, dtype, batch, None)


def test_activations_of_parts_are_what_autograd_keeps() -> None:
    config = _larger("bloom")
    for part in (
        Part(0, 0, embedding=True, head=False),
        Part(0, 2, embedding=False, head=False),
        Part(1, 2, embedding=False, head=True),
    ):
        _expect_activations(config, torch.float32, 2, None, part=part)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_activations_of_split_models_are_what_autograd_keeps(ranks: int, sequence_parallel: bool) -> None:
    axis = Mesh(tp=ranks).tp
    for family in FAMILIES:
        _expect_activations(
            replace(_larger(family), dropout=0.1), torch.float32, 2, axis, sequence_parallel=sequence_parallel
        )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ["ring", "all-to-all"])
def test_activations_over_a_context_axis_are_what_autograd_keeps(
    form: Literal["ring", "all-to-all"],
) -> None:
    mesh = Mesh(cp=2, tp=2)
    for family in FAMILIES:
        config = replace(_larger(family), dropout=0.1, attention_dropout=0.1)
        _expect_activations(
            config, torch.float32, 2, mesh.tp, sequence_parallel=True, context=mesh.cp, form=form
        )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_a_chunked_loss_and_kept_inputs_are_counted(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for family in FAMILIES:
        for keep_inputs, chunked_loss in ((False, True), (True, True), (True, False)):
            _expect_activations(
                _larger(family), torch.float32, 2, axis, sequence_parallel=ranks > 1,
                keep_inputs=keep_inputs, chunked_loss=chunked_loss,
            )  # fmt: skip


def test_a_chunked_loss_has_as_many_logits_as_are_there_at_once() -> None:
    config = preset("gpt2", layers=1, vocab=1 << 20)
    plain, chunked = (
        memory(config, layout=RankLayout(chunked_loss=chunked)).activations for chunked in (False, True)
    )
    logits = 1024 * (1 << 20) * 4
    assert head_loss._CHUNK_ON_CPU < head_loss._CHUNK_ON_ACCELERATOR == 1 << 26
    assert plain - chunked == logits + (logits - (1 << 26) * 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_experts_are_what_autograd_keeps(dtype: torch.dtype) -> None:
    for family in ("mixtral", "three"):
        for batch in (1, 3):
            _expect_activations(_larger(family), dtype, batch, None)


@pytest.mark.ranks(4)
def test_activations_and_states_of_split_experts_are_what_is_there() -> None:
    """Ranks of ``ep`` get more or fewer rows than the mean; together they get as many."""
    mesh = Mesh(dp=2, ep=2, tp=2)
    for sequence_parallel in (False, True):
        for family in ("mixtral", "three"):
            config = _larger(family)
            _expect_activations(config, torch.float32, 2, mesh.tp, sequence_parallel=sequence_parallel)
            model = Transformer(config, tensor=mesh.tp, expert=mesh.ep, expert_data=mesh.expert_data)
            layout = RankLayout(tensor=2, tensor_rank=mesh.tp.rank, expert=2)
            assert memory(config, layout=layout).parameters == sum(p.nbytes for p in model.parameters())


def test_room_for_fewer_keeps_less() -> None:
    """At most what is estimated, as some experts have room to spare."""
    config = replace(_larger("switch"), expert_capacity=0.5)
    kept, use = _kept(Transformer(config), 2), memory(config, micro_batch=2)
    assert 0.9 < kept / (use.activations - 2 * 32 * 101 * 4) <= 1.01


def test_experts_are_sharded_over_those_who_have_the_same() -> None:
    config = _larger("mixtral")
    dense = memory(replace(config, experts=0, router_z_loss=0.0), layout=RankLayout()).parameters // 4
    experts = 2 * 4 * 3 * 64 * config.ffn_size
    dense += 2 * 4 * 64 - 2 * 3 * 64 * config.ffn_size  # with routers, without the one network
    use = memory(config, layout=RankLayout(data=8, expert=4, zero_stage=3))
    assert use.parameters == 4 * (-(-dense // 8) + experts // 8)


def test_micro_batches_in_flight_multiply_what_is_kept() -> None:
    config = _larger("gpt2")
    one, three = (memory(config, in_flight=count).activations for count in (1, 3))
    logits = 32 * 101 * 4
    assert three - logits == 3 * (one - logits)


def test_close_to_the_papers_formula() -> None:
    """Korthikanti et al., table 2 without the attention core's scores, and without its dropout mask."""
    config = preset("gpt3-175b", layers=1, attention_dropout=0.0)
    layout = RankLayout(part=Part(0, 1, embedding=False, head=False), tensor=8, sequence_parallel=True)
    use = memory(config, layout=layout, dtype=torch.bfloat16)
    assert use.activations == pytest.approx(2048 * 12288 * 34 / 8, rel=0.01)


def _expect_activations(
    config: TransformerConfig,
    dtype: torch.dtype,
    batch: int,
    axis: Axis | None,
    *,
    part: Part | None = None,
    sequence_parallel: bool = False,
    context: Axis | None = None,
    form: Literal["ring", "all-to-all"] = "ring",
    keep_inputs: bool = False,
    chunked_loss: bool = False,
) -> None:
    """Within one percent: rotary tables are not counted, and tokens' statistics are kept narrow by some kernels."""
    model = Transformer(
        config,
        tensor=axis,
        part=part,
        sequence_parallel=sequence_parallel,
        keep_inputs=keep_inputs,
        chunked_loss=chunked_loss,
        context=context,
        context_form=form,
        dtype=dtype,
    )
    tensor = axis.size if axis is not None else 1
    layout = RankLayout(
        part=part,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        keep_inputs=model.keep_inputs,
        chunked_loss=chunked_loss,
        context=model.context.size,
        context_form=form,
    )
    use = memory(config, layout=layout, dtype=dtype, micro_batch=batch)
    logits = 0
    if model.part.head:
        logits = batch * 32 // model.context.size * -(-config.vocab // tensor) * dtype.itemsize
    narrow = 0
    if config.norm == "layernorm" and config.qk_norm:
        # Torch's kernel on a CPU keeps statistics in its input's dtype; those of heads are many.
        rows = batch * 32 * (config.heads + config.num_kv_heads) * config.layers
        narrow = 2 * rows * (torch.float32.itemsize - min(dtype.itemsize, torch.float32.itemsize))
    assert _kept(model, batch) == pytest.approx(use.activations - logits - narrow, rel=0.01)


def _kept(model: Transformer, batch: int) -> int:
    """Bytes of the memory that autograd keeps, each piece once, without the parameters."""
    config = model.config
    storages: dict[int, Tensor] = {}
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    text = torch.randint(config.vocab, (batch, config.sequence + 1))
    x = text[:, :-1]
    if not model.part.embedding:
        split = model.axis.size if model.sequence_parallel else 1
        dtype = next(model.parameters()).dtype
        x = torch.randn(config.sequence // split, batch, config.hidden, dtype=dtype).requires_grad_()
    arguments: dict[str, Any] = {"streams": DropoutStreams(1, 1, torch.arange(batch))}
    if config.experts:
        arguments["routers"] = StepRouters(config, sequences=batch, tokens=text.numel()).micro_batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x, **arguments)
        loss = model.loss(y, text[:, 1:]) if model.part.head else y.sum()
    kept = sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in owned)
    loss.backward()
    return kept
