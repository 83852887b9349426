"""The products themselves: order of work, deferred weight gradients, odd inputs, low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import F64, assert_near, on_ranks, part, values, whole
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, Pending, WeightGradients, gradient_work
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    FusedColumnLinear,
    RowParallelLinear,
    column_linear,
    products,
    row_linear,
)


def column(axis: Axis, sequence_dim: int | None = None, dtype: torch.dtype = F64) -> ColumnParallelLinear:
    torch.manual_seed(1)
    return ColumnParallelLinear(6, 8, axis, sequence_dim=sequence_dim, dtype=dtype)


def row(axis: Axis, sequence_dim: int | None = None, dtype: torch.dtype = F64) -> RowParallelLinear:
    torch.manual_seed(1)
    return RowParallelLinear(6, 8, axis, sequence_dim=sequence_dim, dtype=dtype)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_deferred_weight_gradients_are_the_same(ranks: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=ranks).tp
    torch.manual_seed(1)
    fused = FusedColumnLinear(6, {"query": 8, "key": 4}, axis, sequence_dim=sequence_dim, dtype=F64)
    for layer in (column(axis, sequence_dim), row(axis, sequence_dim), fused):
        batches = [values(12, 3, 6, seed=seed) for seed in (4, 5)]
        dim = 2 if isinstance(layer, RowParallelLinear) else sequence_dim
        inputs = [part(x, axis, dim).clone().requires_grad_() for x in batches]

        def loss(x: Tensor, layer: nn.Module = layer) -> Tensor:
            y = layer(x)
            return (y if isinstance(y, Tensor) else torch.cat(y, dim=-1)).square().sum()

        for x in inputs:
            loss(x).backward()
        expected = gradients(layer)
        layer.zero_grad()
        queue = WeightGradients()
        final: list[Tensor] = []
        weights = [p for p in layer.parameters() if p.dim() == 2]
        for weight in weights:
            gradient_work(weight).queue = queue
            gradient_work(weight).subscribe(weight, final.append)
        for x in inputs:
            loss(x).backward()
        assert len(queue) == 2
        assert [weight.grad for weight in weights] == [None] * len(weights)
        assert final == []
        queue.run()
        assert not any(w.grad is None or w.grad.requires_grad for w in weights)  # no graph kept
        for found, right in zip(gradients(layer), expected, strict=True):
            assert_near(found, right)
        assert {id(weight) for weight in final} == {id(weight) for weight in weights}
        assert len(final) == len(weights)  # told once, after the last piece of work


@pytest.mark.ranks(2)
def test_the_collective_travels_while_the_weight_gradient_is_computed() -> None:
    axis = Mesh(tp=2).tp
    events: list[str] = []

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            events.append(name)
            return function(*arguments, **keywords)

        return call

    def logged_launch(name: str, start: Callable[..., Pending[Tensor]]) -> Callable[..., Pending[Tensor]]:
        def call(*arguments: Any, **keywords: Any) -> Pending[Tensor]:
            pending = start(*arguments, **keywords)
            events.append(f"launch {name}")
            return Pending([], logged(f"wait {name}", pending.wait))

        return call

    layers = {None: column(axis), 0: column(axis, 0)}
    x = part(values(4, 6), axis, 0).requires_grad_()
    outputs = {dim: layer(x) for dim, layer in layers.items()}
    patch = pytest.MonkeyPatch()
    for kind in ("all_reduce_computed", "reduce_scatter", "all_gather"):
        start = getattr(comm, f"start_{kind}")
        patch.setattr(comm, f"start_{kind}", logged_launch(kind, start))
    patch.setattr(products, "_input_gradient", logged("input product", products._input_gradient))
    patch.setattr(products, "_weight_gradients", logged("weight product", products._weight_gradients))
    outputs[None].sum().backward()
    assert events == [
        "input product",
        "launch all_reduce_computed",
        "weight product",
        "wait all_reduce_computed",
    ]
    events.clear()
    outputs[0].sum().backward()
    assert events == [
        "launch all_gather",
        "input product",
        "launch reduce_scatter",
        "wait all_gather",
        "weight product",
        "wait reduce_scatter",
    ]


@pytest.mark.ranks(2)
def test_what_is_not_wanted_is_not_communicated() -> None:
    mesh = Mesh(tp=2)
    layer = column(mesh.tp, 0)
    layer.weight.requires_grad_(False)
    x = part(values(4, 6), mesh.tp, 0).requires_grad_()
    y = layer(x)
    mesh.ledger.reset()
    y.sum().backward()
    assert layer.weight.grad is None
    assert mesh.ledger.total(kind="all_gather").calls == 0
    assert mesh.ledger.total(kind="reduce_scatter").calls == 1
    y = column(mesh.tp, 0)(x.detach())
    mesh.ledger.reset()
    y.sum().backward()
    assert mesh.ledger.total(kind="all_gather").calls == 1
    assert mesh.ledger.total(kind="reduce_scatter").calls == 0


def saved(layer: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the tensors that a forward pass keeps."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    assert y is not None
    return [tuple(tensor.shape) for tensor in kept]


@pytest.mark.ranks(2)
def test_a_frozen_weight_keeps_no_input() -> None:
    axis = Mesh(tp=2).tp
    x, whole = values(2, 6).requires_grad_(), (4, 6)
    for keep_inputs in (False, True):
        layer = ColumnParallelLinear(6, 8, axis, sequence_dim=0, keep_inputs=keep_inputs, dtype=F64)
        assert saved(layer, x) == [whole if keep_inputs else (2, 6)]
        layer.weight.requires_grad_(False)
        assert saved(layer, x) == []
        upstream = values(4, 4, seed=axis.rank)
        (layer(x) * upstream).sum().backward()  # the input's and the bias' gradient need no input
        assert layer.bias is not None
        assert_near(layer.bias.grad, upstream.sum(0))
        fused = FusedColumnLinear(6, {"query": 8, "key": 4}, axis, sequence_dim=0, bias=False, dtype=F64)
        next(fused.parameters()).requires_grad_(False)
        assert (2, 6) in saved(fused, x)
        fused.requires_grad_(False)
        assert (2, 6) not in saved(fused, x)
    down, features = row(axis), values(2, 3)
    assert saved(down, features) == [(2, 3)]
    down.weight.requires_grad_(False)
    assert saved(down, features.requires_grad_()) == []


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
def test_inputs_of_any_layout_and_of_no_tokens(ranks: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=ranks).tp
    up, down = column(axis, sequence_dim), row(axis, sequence_dim)
    straight = part(values(12, 12, 6), axis, sequence_dim).requires_grad_()
    # the same numbers, laid out the other way round, and a gradient that is not contiguous either
    turned = straight.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    weights = part(values(8, 12, 12, seed=9).permute(2, 1, 0), axis, 2)
    for x in (straight, turned):
        (up(x) * weights).sum().backward()
    assert_near(turned.grad, straight.grad)
    features = part(values(6, 12, 12), axis, 0).permute(2, 1, 0)
    assert_near(down(features), down(features.contiguous()))
    up.zero_grad()
    for shape in ((0, 12, 6), (12, 0, 6), (0, 0, 6)):
        empty = part(torch.zeros(shape, dtype=F64), axis, sequence_dim).clone().requires_grad_()
        y = up(empty)
        y.sum().backward()
        assert y.shape == (*shape[:2], len(up.weight))
        assert up.weight.grad is not None
        assert not up.weight.grad.any()
        z = down(part(torch.zeros(*shape[:2], 6, dtype=F64), axis, 2))
        assert whole(z, axis, sequence_dim).shape == (*shape[:2], 8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_bfloat16_stays_near_the_exact_result(sequence_dim: int | None) -> None:
    axis = Mesh(tp=2).tp
    x = values(8, 6)
    exact = {}
    for dtype in (F64, torch.bfloat16):
        up, down = (
            column(axis, sequence_dim).to(dtype),
            RowParallelLinear(8, 4, axis, sequence_dim=sequence_dim, dtype=F64),
        )
        with torch.no_grad():
            down.weight.copy_(part(values(4, 8, seed=2), axis, 1))
        down = down.to(dtype)
        own = part(x.to(dtype), axis, sequence_dim).clone().requires_grad_()
        down(up(own)).float().sum().backward()
        assert own.grad is not None
        assert own.grad.dtype == dtype
        exact[dtype] = [own.grad.double(), *(g.double() for g in gradients(up))]
    for found, right in zip(exact[torch.bfloat16], exact[F64], strict=True):
        assert (found - right).abs().max() < 0.03 * right.abs().max()


def test_autocast_computes_as_for_nn_linear() -> None:
    axis = Axis.single()
    torch.manual_seed(1)
    reference = nn.Linear(6, 8)
    for layer in (column(axis, dtype=torch.float32), row(axis, dtype=torch.float32)):
        results = []
        for module in (reference, layer):
            module.zero_grad()
            x = values(4, 6).float().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = module(x)
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
            assert x.grad is not None
            assert x.grad.dtype == torch.float32
            results.append([y.float(), x.grad, *gradients(module)])
        for found, right in zip(results[1], results[0], strict=True):
            assert found.dtype == right.dtype
            assert (found - right).abs().max() <= 0.02 * right.abs().max()


def test_functions_take_any_weight() -> None:
    axis = Axis.single()
    x, weight, bias = values(3, 6), values(8, 6, seed=2).requires_grad_(), values(8, seed=3).requires_grad_()
    expected = F.linear(x, weight * 2, bias)
    assert_near(column_linear(x, [weight * 2], [bias], axis), expected)
    assert_near(row_linear(x, weight * 2, bias, axis), expected)
    (right,) = torch.autograd.grad(expected.square().sum(), weight)
    (found,) = torch.autograd.grad(row_linear(x, weight * 2, bias, axis).square().sum(), weight)
    assert_near(found, right)
    with pytest.raises(ValueError, match="1 of 2 fused layers have a bias"):
        column_linear(x, [weight, weight], [bias, None], axis)


def test_one_ranks_products_are_torchs_own_unless_they_may_be_put_off() -> None:
    for layer in (column(Axis.single()), row(Axis.single())):
        found: dict[bool, list[Tensor]] = {}
        for promised in (False, True):
            if promised:
                gradient_work(layer.weight).promise()
            x = values(3, 2, 6).requires_grad_()
            y = layer(x)
            assert (y.grad_fn.name() in ("_ColumnProductBackward", "_RowProductBackward")) is promised
            y.square().sum().backward()
            assert x.grad is not None
            found[promised] = [y.detach(), x.grad, *gradients(layer)]
            layer.zero_grad()
        for one, other in zip(found[False], found[True], strict=True):
            assert torch.equal(one, other)


def test_a_weight_that_was_stepped_too_early_is_an_error() -> None:
    for layer in (column(Axis.single()), row(Axis.single())):
        for promised, told in (
            (True, "modified between the forward and the backward"),
            (False, "modified by an inplace operation"),  # torch's own: see products.py
        ):
            if promised:
                gradient_work(layer.weight).promise()
            loss = layer(values(3, 6).requires_grad_()).sum()
            with torch.no_grad():
                layer.weight.add_(1.0)
            with pytest.raises(RuntimeError, match=told):
                loss.backward()
            if promised:
                gradient_work(layer.weight).retract()


@pytest.mark.ranks(2)
def test_activation_checkpointing_computes_the_same() -> None:
    axis = Mesh(tp=2).tp
    layer = column(axis, 0)
    x = part(values(4, 6), axis, 0).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    expected = [x.grad.clone(), *gradients(layer)]
    layer.zero_grad()
    x.grad = None
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert x.grad is not None
    for found, right in zip([x.grad, *gradients(layer)], expected, strict=True):
        assert torch.equal(found, right)
