"""What is computed again changes no bit of a loss or a gradient, costs what `flops` says, and keeps what `memory` says.

The last two are counted: operations by torch's counter, bytes by the storages that are alive. See `live.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from packages.models.tests.live import Live
from packages.models.tests.reference import FAMILIES, MIXTURES, batch_of, build
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardweave.comm import Axis, DropoutStreams, Mesh, all_reduce
from shardweave.models import (
    OPERATIONS,
    Part,
    RankLayout,
    Recompute,
    StepRouters,
    Transformer,
    TransformerConfig,
    flops,
    memory,
)

Mode = str | Mapping[str, int | Sequence[str]]

MODES: tuple[Mode, ...] = (
    "none", "selective", "full", {"every": 2}, {"operations": ["norm", "activation", "elementwise"]},
    {"operations": ["attention"]}, {"operations": ["linear"]}, {"operations": ["linear", "attention"]},
)  # fmt: skip
CASES = {**FAMILIES, **MIXTURES}


def test_what_a_configuration_says() -> None:
    modes = [Recompute.of(mode) for mode in MODES]
    assert [str(mode) for mode in modes] == [
        "none", "selective", "full", "every 2", "operations norm, activation, elementwise", "operations attention",
        "operations linear", "operations attention, linear",
    ]  # fmt: skip
    assert [[layer for layer in range(5) if mode.covers(layer)] for mode in modes[:4]] == [
        [], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 3],
    ]  # fmt: skip
    assert [set(mode.kept) for mode in modes[2:]] == [
        set(), set(), {"linear", "attention"}, {"linear"}, {"attention"}, set(),
    ]  # fmt: skip
    assert Recompute.of(modes[3]) is modes[3]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ful", r"recompute: 'ful' is not one of none, selective, full, {every: N} or {operations: \[...\]}"),
        ({"every": 0}, "every: 0 must be a whole number of at least 1"),
        ({"every": True}, "every: True must be"),
        (
            {"operations": ["norm", "mlp"]},
            f"'mlp' is no operation of a block; name some of {', '.join(OPERATIONS)}",
        ),
        ({"operations": []}, "no operation is named"),
        ({"operations": "linear", "every": 2}, "is not one of"),
    ],
)
def test_anything_else_is_refused(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Recompute.of(value)
    with pytest.raises(ValueError, match=text):
        Transformer(FAMILIES["gpt2"], recompute=value, device="meta")


@pytest.mark.parametrize("family", CASES)
def test_b027_no_bit_changes_and_the_operations_are_those_that_are_counted(family: str) -> None:
    """With all dropout and every parameter off its initial value, in float32; a fused core, too, without."""
    for dropout in (0.1, 0.0):
        config = replace(CASES[family], dropout=dropout, attention_dropout=dropout)
        right = None
        for mode in MODES if dropout else ("none", "selective", "full", {"operations": ["linear"]}):
            model = build(config, recompute=mode).float()
            torch.manual_seed(3)
            with counting() as counter:
                found = step(model)
            found.append(torch.get_rng_state())
            right = right or found
            assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True)), mode
            if config.expert_capacity is None:  # which leaves tokens out
                assert counter.get_total_flops() == flops(config, batch=3, recompute=mode).hardware, mode


@pytest.mark.parametrize("documents", [False, True])
def test_b106_documents_and_kept_results(documents: bool) -> None:
    """The core for documents is a function of its own, whose result is kept as a whole."""
    config = FAMILIES["bloom"]
    tokens, _ = batch_of(config)
    cut = (torch.arange(8) >= 3).long().expand(3, 8) if documents else None
    found = [step(build(config, recompute=mode), documents=cut) for mode in MODES]
    other = step(build(config), documents=torch.zeros(3, 8).long())
    assert torch.equal(found[0][0], other[0]) is not documents
    for one in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(one, found[0], strict=True))
    assert tokens.shape == (3, 8)


def test_evaluation_and_no_gradients_cost_nothing() -> None:
    config = FAMILIES["llama"]
    model, tokens = build(config, recompute="full"), batch_of(config)[0]
    with torch.no_grad():
        model.eval()(tokens)  # angles that are kept for all calls
        with Live([*model.parameters(), tokens]) as live:
            plain = model(tokens)
    assert live.total() == plain.nbytes
    again = model(
        tokens
    ).sum()  # in evaluation mode, with gradients: nothing is dropped, and blocks run again
    with counting() as counter:
        again.backward()
    assert counter.get_total_flops() > 2 * flops(config, batch=3).forward


def test_a_graph_that_is_kept_goes_back_twice() -> None:
    for mode in ("full", {"operations": ["attention"]}):
        model = build(FAMILIES["gpt2"], recompute=mode)
        tokens, targets = batch_of(model.config)
        loss = model.loss(model(tokens), targets)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


@pytest.mark.ranks(2)
def test_on_two_ranks() -> None:
    """A kept result is that behind the sum over the ranks: neither added up nor sent again. B106: documents, too."""
    tensor, context = Mesh(tp=2), Mesh(cp=2)
    documents = (torch.arange(8) >= 3).long().expand(3, 8)
    for mesh, family, options in (
        (tensor, "gpt2", {"tensor": tensor.tp}),
        (tensor, "llama", {"tensor": tensor.tp, "sequence_parallel": True, "keep_inputs": True}),
        (tensor, "three", {"tensor": tensor.tp, "sequence_parallel": True}),
        (context, "bloom", {"context": context.cp}),
        (context, "llama", {"context": context.cp, "context_form": "all-to-all"}),
    ):
        config = replace(CASES[family], dropout=0.1, attention_dropout=0.1)
        right = None
        sent: dict[str, int] = {}
        for mode in MODES[:6]:
            model = build(config, recompute=mode, **options)
            before = mesh.ledger.total().sent
            torch.manual_seed(3)
            with counting() as counter:
                found = step(model, documents=documents if family == "bloom" else None)
            sent[str(Recompute.of(mode))] = mesh.ledger.total().sent - before
            right = right or found
            assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True)), (
                family,
                mode,
            )
            if mesh is tensor and not config.experts:
                total = all_reduce(torch.tensor(counter.get_total_flops()), mesh.tp)
                assert total == flops(config, batch=3, recompute=mode).hardware, mode
        if not config.experts:
            # What is kept is not sent again; the all-to-all lies around the core.
            named = "selective" if mesh is tensor else "none"
            assert sent["none"] == sent[named] < sent["every 2"] < sent["full"], family
        if family in ("gpt2", "bloom"):
            assert sent["operations norm, activation, elementwise"] == sent["none"], family


def _larger(family: str, dropout: float) -> TransformerConfig:
    config = replace(CASES[family], hidden=64, heads=8, head_dim=None, ffn=None, vocab=101, sequence=32)
    written_out = 0.0 if config.position == "alibi" else dropout  # whose mask is there, but not of one dtype
    return replace(config, dropout=dropout, attention_dropout=written_out)


@pytest.mark.parametrize(
    ("family", "mode", "dropout", "dtype"),
    [
        ("gpt2", "selective", 0.1, torch.float32),
        ("gpt2", {"operations": ["attention"]}, 0.1, torch.bfloat16),
        ("bloom", "full", 0.0, torch.float32),
        ("bloom", {"operations": ["norm"]}, 0.1, torch.float64),
        ("llama", {"every": 2}, 0.1, torch.float32),
        ("llama", "selective", 0.0, torch.float32),
        ("llama", {"operations": ["linear"]}, 0.1, torch.float32),
        ("mixed", {"operations": ["norm"]}, 0.1, torch.float32),
        ("plain", "none", 0.1, torch.float32),
        ("plain", "full", 0.1, torch.bfloat16),
        ("mixtral", {"operations": ["attention"]}, 0.0, torch.float32),
        ("three", "full", 0.1, torch.float32),
    ],
    ids=str,
)
def test_what_is_alive_is_what_memory_says(
    family: str, mode: Mode, dropout: float, dtype: torch.dtype
) -> None:
    expect_alive(_larger(family, dropout), mode, dtype)


def test_parts_and_micro_batches_in_flight() -> None:
    """The second half of a model whose every second block runs again, with two micro-batches."""
    for part in (Part(1, 2, embedding=False, head=True), Part(0, 1, embedding=True, head=False)):
        for mode in ({"every": 2}, "full"):
            expect_alive(_larger("gpt2", 0.1), mode, torch.float32, part=part, in_flight=2)


@pytest.mark.ranks(2)
def test_what_is_alive_on_two_ranks() -> None:
    tensor, context = Mesh(tp=2).tp, Mesh(cp=2).cp
    for family, mode, dropout, sequence_parallel in (
        ("bloom", {"operations": ["norm"]}, 0.1, False),
        ("llama", "selective", 0.1, False),
        ("gpt2", "full", 0.1, True),
        ("llama", {"operations": ["attention"]}, 0.0, True),
    ):
        expect_alive(
            _larger(family, dropout), mode, torch.float32, axis=tensor, sequence_parallel=sequence_parallel
        )
    for mode in ("none", "selective", "full", {"operations": ["linear"]}):
        expect_alive(_larger("llama", 0.1), mode, torch.float32, context=context)


def step(model: Transformer, **arguments: Any) -> list[Tensor]:
    """The loss of `batch_of` and all gradients."""
    config = model.config
    tokens, targets = batch_of(config)
    if config.experts:
        arguments["routers"] = StepRouters(config, sequences=3, tokens=24).micro_batch()
    loss = model.loss(model(tokens, **arguments), targets)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [loss.detach(), *gradients]


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """torch's counter, told what it does not know: a fused core makes two products forward and counts four backward.

    The CPU's makes the scores once more in backward, as those of accelerators do: a kernel's own way, which neither
    published counts nor ours have in them.
    """
    aten = torch.ops.aten
    core = "_scaled_dot_product_flash_attention_for_cpu"
    known = {
        aten.addmm_: lambda total, left, right, **options: 2 * left.numel() * right[1],
        getattr(aten, core): lambda q, k, v, *others, **options: _products(2, q, k),
        getattr(aten, f"{core}_backward"): lambda grad, q, k, v, *others, **options: _products(4, q, k),
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        yield counter


def _products(number: int, q: torch.Size, k: torch.Size) -> int:
    return number * 2 * q.numel() * k[2]


def expect_alive(
    config: TransformerConfig,
    mode: Mode,
    dtype: torch.dtype,
    *,
    part: Part | None = None,
    axis: Axis | None = None,
    context: Axis | None = None,
    sequence_parallel: bool = False,
    in_flight: int = 1,
) -> None:
    """Within a thousandth, between forward and backward; on one rank, in backward, at most a twentieth more."""
    model = Transformer(
        config, part=part, tensor=axis, context=context, sequence_parallel=sequence_parallel, recompute=mode,
        dtype=dtype,
    )  # fmt: skip
    layout = RankLayout(
        part=part,
        tensor=model.axis.size,
        tensor_rank=model.axis.rank,
        sequence_parallel=model.sequence_parallel,
        context=model.context.size,
    )
    text = torch.randint(config.vocab, (in_flight, 3, config.sequence + 1))
    tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
    x = tokens
    if not model.part.embedding:
        ranks = model.context.size * (model.axis.size if model.sequence_parallel else 1)
        x = torch.randn(in_flight, config.sequence // ranks, 3, config.hidden, dtype=dtype).requires_grad_()
    samples = torch.arange(3, dtype=torch.int64)
    with torch.no_grad():
        model(x[0], streams=DropoutStreams(1, 1, samples))  # angles and masks that all micro-batches share
    losses = []
    routers = StepRouters(config, sequences=3, tokens=96) if config.experts else None
    live = Live([*model.parameters(), *model.buffers(), x, tokens, targets, samples])
    with live:
        for number in range(in_flight):
            given = {} if routers is None else {"routers": routers.micro_batch()}
            y = model(x[number], streams=DropoutStreams(1, 1, samples), **given)
            losses.append(model.loss(y, targets[number]) if model.part.head else y)
            del y
        if routers is not None:
            live.leave_out(*(row for one in routers._micro_batches for _, row in one.rows))
        live.leave_out(*losses)
        kept, live.peak = live.total(), 0
        losses[-1].backward(torch.ones_like(losses[-1]))
    one, two = (
        memory(config, layout=layout, dtype=dtype, micro_batch=3, in_flight=count, recompute=mode).activations
        for count in (1, 2)
    )
    narrow = 2 if dtype == torch.bfloat16 else 0  # norms of the CPU keep statistics in their input's dtype
    if not model.part.embedding:
        kept += x.nbytes  # what came from the part before
    assert kept == pytest.approx(in_flight * (two - one), rel=0.001 + 0.004 * narrow)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    most = one + (in_flight - 1) * (two - one)
    # Experts and rings have several buffers in backward that are as large as what they keep; so have collectives.
    if not config.experts and model.axis.size == model.context.size == 1:
        assert live.peak < 1.05 * (most + gradients)
        assert live.peak > 0.9 * most
