"""Ways of splitting one module over two ranks: each gives a forward and backward pass as a function.

All start from the same whole module. A pass ends with every gradient that a step of an optimizer would need: also
those of the input, and, with sequence parallelism, the sums of what each rank has a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from packages.tensor_parallel.benchmarks._models import (
    GPT,
    MLP,
    Block,
    Shape,
    activations,
    plain_gpt,
    plain_mlp,
    tokens,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from shardweave.comm import Axis, full_index, scatter_to, sum_partial_gradients
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    mark_partial,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "DTENSOR",
    "LOSS_PARALLEL",
    "OURS",
    "PRODUCTS",
    "SHARE",
    "Pass",
    "gpt_ways",
    "mlp_ways",
    "passed",
    "trained",
]

Pass = Callable[[], float]
"""Forward and backward; returns a number that all ways agree on: the mean of the output, or the loss."""

PRODUCTS, SHARE, OURS = "products", "share, nothing sent", "ours"
DTENSOR, LOSS_PARALLEL = "DTensor", "DTensor, loss_parallel"


def mlp_ways(shape: Shape, axis: Axis) -> dict[str, Pass]:
    """By name, in the table's order; megatron-core is elsewhere."""
    return {
        PRODUCTS: _products([(shape.inner, shape.hidden, 1), (shape.hidden, shape.inner, 1)], shape, axis, 0),
        SHARE: _share_of_mlp(shape, axis),
        OURS: _our_mlp(shape, axis, None, False),
        f"{OURS}, sequence": _our_mlp(shape, axis, 0, False),
        f"{OURS}, sequence, kept": _our_mlp(shape, axis, 0, True),
        DTENSOR: _dtensor_mlp(shape, axis),
    }


def gpt_ways(shape: Shape, axis: Axis) -> dict[str, Pass]:
    """By name, in the table's order; megatron-core is elsewhere."""
    layers = shape.layers
    linear = [
        (3 * shape.hidden, shape.hidden, layers),
        (shape.hidden, shape.hidden, layers),
        (shape.inner, shape.hidden, layers),
        (shape.hidden, shape.inner, layers),
        (shape.vocabulary, shape.hidden, 1),
    ]
    return {
        PRODUCTS: _products(linear, shape, axis, layers),
        SHARE: _share_of_gpt(shape, axis),
        OURS: _our_gpt(shape, axis, None, False),
        f"{OURS}, sequence": _our_gpt(shape, axis, 0, False),
        f"{OURS}, sequence, kept": _our_gpt(shape, axis, 0, True),
        DTENSOR: _dtensor_gpt(shape, axis, vocabulary_split=False),
        LOSS_PARALLEL: _dtensor_gpt(shape, axis, vocabulary_split=True),
    }


def passed(module: nn.Module, x: Tensor, upstream: Tensor) -> Pass:
    """An MLP's pass, with the gradient ``upstream`` of its output."""

    def step() -> float:
        module.zero_grad()
        x.grad = None
        y = module(x)
        y.backward(upstream)
        sum_partial_gradients(module.parameters())
        assert x.grad is not None
        float(x.grad.flatten()[0])  # some are still under way
        return float(y.detach().mean())

    return step


def trained(module: nn.Module, loss: Callable[[], Tensor]) -> Pass:
    """A GPT's pass."""

    def step() -> float:
        module.zero_grad()
        value = loss()
        value.backward()
        sum_partial_gradients(module.parameters())
        return float(value.detach())

    return step


@torch.no_grad()
def _copy(split: nn.Module, whole: nn.Module) -> None:
    """This rank's slices of the whole module's parameters, which have the same names."""
    parameters: Mapping[str, Tensor] = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        parameter.copy_(parameters[name][full_index(parameter)])


def _mlp(shape: Shape, axis: Axis, sequence_dim: int | None, keep_inputs: bool) -> MLP:
    return MLP(
        ColumnParallelLinear(
            shape.hidden, shape.inner, axis, sequence_dim=sequence_dim, keep_inputs=keep_inputs
        ),
        RowParallelLinear(shape.inner, shape.hidden, axis, sequence_dim=sequence_dim),
    )


def _own(x: Tensor, axis: Axis, sequence_dim: int | None) -> Tensor:
    return x if sequence_dim is None else scatter_to(x, axis, sequence_dim).contiguous()


def _our_mlp(shape: Shape, axis: Axis, sequence_dim: int | None, keep_inputs: bool) -> Pass:
    module = _mlp(shape, axis, sequence_dim, keep_inputs)
    _copy(module, plain_mlp(shape))
    x = _own(activations(shape, 1), axis, sequence_dim).requires_grad_()
    return passed(module, x, _own(activations(shape, 2), axis, sequence_dim))


def _our_gpt(shape: Shape, axis: Axis, sequence_dim: int | None, keep_inputs: bool) -> Pass:
    blocks = [
        Block(
            ParallelAttention(
                shape.hidden, shape.heads, axis, sequence_dim=sequence_dim, keep_inputs=keep_inputs
            ),
            _mlp(shape, axis, sequence_dim, keep_inputs),
            shape.hidden,
        )
        for _ in range(shape.layers)
    ]
    length = shape.sequence // axis.size
    own = slice(None) if sequence_dim is None else slice(axis.rank * length, (axis.rank + 1) * length)
    module = GPT(
        VocabParallelEmbedding(shape.vocabulary, shape.hidden, axis, sequence_dim=sequence_dim),
        blocks,
        ColumnParallelLinear(
            shape.hidden,
            shape.vocabulary,
            axis,
            bias=False,
            sequence_dim=sequence_dim,
            keep_inputs=keep_inputs,
        ),
        shape,
        own,
    )
    if sequence_dim is not None:
        mark_partial([module.position], axis)
        mark_partial(module.norm, axis)
        for block in blocks:
            mark_partial(block.norm1, axis)
            mark_partial(block.norm2, axis)
    _copy(module, plain_gpt(shape))
    ids, targets = tokens(shape)

    def loss() -> Tensor:
        return vocab_parallel_cross_entropy(module(ids), targets, axis, vocab_size=shape.vocabulary).mean()

    return trained(module, loss)


def _share_of_mlp(shape: Shape, axis: Axis) -> Pass:
    """As large a module as a rank's share, of plain torch: what is left of any way that is made of torch's operations
    when nothing is sent, nothing split, and nothing checked."""
    module = plain_mlp(shape, axis.size)
    step = passed(module, activations(shape, 1).requires_grad_(), activations(shape, 2))
    return _of_no_result(step)


def _share_of_gpt(shape: Shape, axis: Axis) -> Pass:
    """As :func:`_share_of_mlp`; its loss is over a vocabulary of a rank's size."""
    module = plain_gpt(shape, axis.size)
    ids, targets = (part % (shape.vocabulary // axis.size) for part in tokens(shape))

    def loss() -> Tensor:
        return F.cross_entropy(module(ids).flatten(0, 1), targets.flatten())

    return _of_no_result(trained(module, loss))


def _of_no_result(step: Pass) -> Pass:
    """The number that it gives is not that of the others."""

    def run() -> float:
        step()
        return float("nan")

    return run


def _dtensor_mlp(shape: Shape, axis: Axis) -> Pass:
    module = plain_mlp(shape)
    mesh = init_device_mesh("cpu", (axis.size,))
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return passed(module, activations(shape, 1).requires_grad_(), activations(shape, 2))


def _dtensor_gpt(shape: Shape, axis: Axis, *, vocabulary_split: bool) -> Pass:
    module = plain_gpt(shape)
    mesh = init_device_mesh("cpu", (axis.size,))
    head = (
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        if vocabulary_split
        else ColwiseParallel(output_layouts=Replicate())
    )
    plan: dict[str, ParallelStyle] = {
        f"blocks.*.{name}": ColwiseParallel()
        for name in ("attention.query", "attention.key", "attention.value", "mlp.up")
    }
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("attention.output", "mlp.down")}
    embedding = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(module, mesh, {"embedding": embedding, "head": head, **plan})
    ids, targets = tokens(shape)

    def loss() -> Tensor:
        return F.cross_entropy(module(ids).flatten(0, 1), targets.flatten())

    if not vocabulary_split:
        return trained(module, loss)

    def step() -> float:
        with loss_parallel():
            return trained(module, loss)()

    return step


def _products(linear: list[tuple[int, int, int]], shape: Shape, axis: Axis, cores: int) -> Pass:
    """One rank's matrix products and nothing else: three of each linear layer, six of each attention core.

    ``linear``: output and input features and how often; the larger side is split.
    """
    rows = shape.sequence * shape.batch
    work: list[Callable[[], object]] = []
    for out, width, times in linear:
        if out >= width:
            out //= axis.size
        else:
            width //= axis.size
        x, weight, dy = torch.randn(rows, width), torch.randn(out, width), torch.randn(rows, out)
        work += [
            partial(F.linear, x, weight),
            partial(torch.mm, dy, weight),
            partial(torch.mm, dy.t(), x),
        ] * times
    heads = shape.batch * shape.heads // axis.size
    q, k, v = torch.randn(3, heads, shape.sequence, shape.head_dim)
    p = torch.randn(heads, shape.sequence, shape.sequence)
    work += [
        partial(torch.bmm, q, k.mT),
        partial(torch.bmm, p, v),
        partial(torch.bmm, v, k.mT),
        partial(torch.bmm, p.mT, q),
        partial(torch.bmm, p, k),
        partial(torch.bmm, p.mT, v),
    ] * cores

    def step() -> float:
        for product in work:
            product()
        return float("nan")

    return step
