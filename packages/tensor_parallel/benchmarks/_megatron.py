"""megatron-core's MLP and GPT on a CPU, where ``megatron-core==0.16.1`` is installed; with the weights of the others.

It asks CUDA for the device of a buffer and for a generator of dropout masks, which this benchmark does not draw. Those
two calls are patched out, in this process and for good. Sequence parallelism needs Transformer Engine there, so it is
not among the ways.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

import torch
from packages.tensor_parallel.benchmarks._models import (
    MLP,
    Shape,
    activations,
    plain_gpt,
    plain_mlp,
    tokens,
)
from packages.tensor_parallel.benchmarks._ways import Pass, passed, trained
from torch import Tensor, nn

from shardweave.comm import Axis

__all__ = ["MEGATRON", "installed", "megatron_gpt", "megatron_mlp"]

MEGATRON = "megatron-core"


def installed() -> bool:
    """Whether it can take part."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def megatron_mlp(shape: Shape, axis: Axis) -> Pass:
    """A pass of its MLP."""
    _start(axis)
    layers = _module("tensor_parallel.layers")
    mlp = _module("transformer.mlp")
    parts = mlp.MLPSubmodules(linear_fc1=layers.ColumnParallelLinear, linear_fc2=layers.RowParallelLinear)
    module = mlp.MLP(_config(shape, axis), parts, ffn_hidden_size=shape.inner)
    _copy_mlp(module, plain_mlp(shape), axis)
    return passed(_Biased(module), activations(shape, 1).requires_grad_(), activations(shape, 2))


def megatron_gpt(shape: Shape, axis: Axis) -> Pass:
    """A pass of its GPT."""
    _start(axis)
    model = _module("models.gpt.gpt_model").GPTModel(
        _config(shape, axis),
        _module("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(),
        shape.vocabulary,
        shape.sequence,
        position_embedding_type="learned_absolute",
    )
    _copy_gpt(model, shape, axis)
    ids, targets = (part.t().contiguous() for part in tokens(shape))
    positions = torch.arange(shape.sequence).expand_as(ids)
    later = (
        torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1).view(1, 1, *[shape.sequence] * 2)
    )

    def loss() -> Tensor:
        of_tokens: Tensor = model(ids, positions, later, labels=targets)
        return of_tokens.mean()

    return trained(model, loss)


class _Biased(nn.Module):
    """Adds the bias that its layers hand out beside the output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.module(x)
        result: Tensor = y + bias
        return result


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _start(axis: Axis) -> None:
    """Its own groups, once a process, and the patches."""
    state = _module("parallel_state")
    if state.model_parallel_is_initialized():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    tracker = _module("tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    state.initialize_model_parallel(tensor_model_parallel_size=axis.size)


def _config(shape: Shape, axis: Axis) -> Any:
    return _module("transformer.transformer_config").TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=shape.inner,
        tensor_model_parallel_size=axis.size,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        async_tensor_model_parallel_allreduce=True,
    )


@torch.no_grad()
def _copy_mlp(module: Any, whole: MLP, axis: Axis) -> None:
    up, down = whole.up, whole.down
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    module.linear_fc1.weight.copy_(_own(up.weight, axis, 0))
    module.linear_fc1.bias.copy_(_own(up.bias, axis, 0))
    module.linear_fc2.weight.copy_(_own(down.weight, axis, 1))
    module.linear_fc2.bias.copy_(down.bias)


@torch.no_grad()
def _copy_gpt(model: Any, shape: Shape, axis: Axis) -> None:
    whole: Any = plain_gpt(shape)
    model.embedding.word_embeddings.weight.copy_(_own(whole.embedding.weight, axis, 0))
    model.embedding.position_embeddings.weight.copy_(whole.position)
    for layer, block in zip(model.decoder.layers, whole.blocks, strict=True):
        parts = (block.attention.query, block.attention.key, block.attention.value)
        for name in ("weight", "bias"):
            # head by head: query, key, value
            by_head = [getattr(part, name).unflatten(0, (shape.heads, shape.head_dim)) for part in parts]
            together = torch.stack(by_head, dim=1).flatten(0, 2)
            getattr(layer.self_attention.linear_qkv, name).copy_(_own(together, axis, 0))
        layer.self_attention.linear_proj.weight.copy_(_own(block.attention.output.weight, axis, 1))
        layer.self_attention.linear_proj.bias.copy_(block.attention.output.bias)
        _copy_mlp(layer.mlp, block.mlp, axis)
        layer.input_layernorm.load_state_dict(block.norm1.state_dict())
        layer.pre_mlp_layernorm.load_state_dict(block.norm2.state_dict())
    model.decoder.final_layernorm.load_state_dict(whole.norm.state_dict())
    model.output_layer.weight.copy_(_own(whole.head.weight, axis, 0))


def _own(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    return whole.chunk(axis.size, dim)[axis.rank]
