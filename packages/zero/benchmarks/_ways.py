"""Ways of training one module data parallel, each with an AdamW of its own behind the same call.

All of them average gradients over the axis, clip their global norm and step with torch's AdamW, in its fused form
unless the name says otherwise: what torch chooses by itself on a CPU, one parameter after the other, takes three times
as long, and says nothing about sharding. In bf16 all of them update fp32 masters; for those that have none
(DDP) the loop keeps them, as loops do. Gradients are then added up and sent in bf16, as the peers do it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.zero import MixedPrecision, ZeroOptimizer

__all__ = ["DDP", "STAGES", "Step", "Task", "Way", "not_built", "peers", "plain", "zero"]

STAGES = (0, 1, 2, 3)
"""Ours that are asked for."""
RATE = 1e-3
DDP = "DDP"
"""The way that others are compared with."""

Inputs = Sequence[tuple[Tensor, ...]]
Step = Callable[[Inputs], Tensor]
"""One step on the micro-batches of a rank, each the arguments of the module; returns the last one's loss."""


@dataclass(frozen=True)
class Task:
    """What is trained."""

    build: Callable[[], nn.Module]
    """A new module that returns a loss; equal on all ranks."""
    units: Callable[[nn.Module], Sequence[nn.Module]]
    """The parts that a peer should gather one by one; the rest goes with the module itself."""
    bf16: bool = False
    clip: float | None = 1.0
    micro_batches: int = 1
    sequences: int = 1
    """Of a micro-batch, on one rank; who configures a batch size has to know."""


Way = Callable[[Task, Axis], Step]


def not_built(stage: int) -> str | None:
    """Why ZeroOptimizer cannot be measured at a stage; None if it can."""
    module = nn.Linear(2, 2)
    try:
        ZeroOptimizer(module.parameters(), torch.optim.AdamW, **_stage(stage, module), data=Axis.single())
    except (TypeError, ValueError) as error:
        return f"stage {stage} is not measured: {error}"
    return None


def peers() -> Mapping[str, Way]:
    """By name: what torch has, and DeepSpeed where it is installed."""
    ways: dict[str, Way] = {
        DDP: partial(_ddp, fused=True),
        "DDP, AdamW not fused": partial(_ddp, fused=False),
        "ZeroRedundancyOptimizer": _redundancy,
        "FSDP2": partial(_fsdp, reshard=True),
        "FSDP2, kept after forward": partial(_fsdp, reshard=False),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        ways |= {f"DeepSpeed {stage}": partial(_deepspeed, stage=stage) for stage in STAGES}
    return ways


def plain(task: Task, axis: Axis) -> Step:
    """One rank and nothing else: torch's optimizer over the module's parameters."""
    module = _module(task)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
    update = partial(_Plain(module).update, optimizer, task.clip)
    return _loop(task, module, nullcontext, update, optimizer.zero_grad)


def zero(stage: int, **options: Any) -> Way:
    """ZeroOptimizer at a stage, as it is by default but for ``options``."""
    return partial(_zero, stage=stage, options=options)


# ---- ours ----


def _zero(task: Task, axis: Axis, *, stage: int, options: Mapping[str, Any]) -> Step:
    module = _module(task)
    precision = MixedPrecision(gradients=torch.bfloat16) if task.bf16 else None
    arguments = {"precision": precision, "clip": task.clip, "lr": RATE, **_stage(stage, module), **options}
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, data=axis, **arguments)
    return _loop(task, module, optimizer.accumulate, optimizer.step, optimizer.zero_grad)


def _stage(stage: int, module: nn.Module) -> dict[str, Any]:
    return {"stage": stage, "module": module} if stage == 3 else {"stage": stage}


# ---- torch's ----


def _ddp(task: Task, axis: Axis, *, fused: bool) -> Step:
    module = nn.parallel.DistributedDataParallel(_module(task), process_group=axis.group)
    parameters = _Masters(module) if task.bf16 else _Plain(module)
    optimizer = torch.optim.AdamW(parameters.updated, lr=RATE, fused=fused)
    update = partial(parameters.update, optimizer, task.clip)
    return _loop(task, module, module.no_sync, update, module.zero_grad)


def _redundancy(task: Task, axis: Axis) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if task.bf16:
        raise ValueError("ZeroRedundancyOptimizer has no fp32 masters: leave it out in bf16")
    module = nn.parallel.DistributedDataParallel(_module(task), process_group=axis.group)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, process_group=axis.group, lr=RATE, fused=True
    )
    return _loop(
        task, module, module.no_sync, partial(_Plain(module).update, optimizer, task.clip), module.zero_grad
    )


def _fsdp(task: Task, axis: Axis, *, reshard: bool) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = task.build()
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert axis.group is not None
    arguments: dict[str, Any] = {"mesh": DeviceMesh.from_group(axis.group, "cpu")}
    if task.bf16:
        arguments["mp_policy"] = low
    for unit in task.units(module):
        fully_shard(unit, reshard_after_forward=reshard, **arguments)
    whole: Any = fully_shard(module, **arguments)  # kept after forward, as it has the root by default
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)

    @contextmanager
    def no_sync() -> Iterator[None]:
        whole.set_requires_gradient_sync(False)
        yield
        whole.set_requires_gradient_sync(True)

    return _loop(
        task, module, no_sync, partial(_Plain(module).update, optimizer, task.clip), module.zero_grad
    )


class _Plain:
    """Parameters that the optimizer updates themselves."""

    def __init__(self, module: nn.Module) -> None:
        self.updated = list(module.parameters())

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(self.updated, clip)
        optimizer.step()


class _Masters:
    """Copies in float32 that the optimizer updates instead of bf16 parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: list[Tensor] = list(module.parameters())
        self.updated = [parameter.detach().float() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        for parameter, master in zip(self.parameters, self.updated, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.updated, clip)
        optimizer.step()
        torch._foreach_copy_(self.parameters, self.updated)
        optimizer.zero_grad()


# ---- DeepSpeed ----


def _deepspeed(task: Task, axis: Axis, *, stage: int) -> Step:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ.setdefault("LOCAL_RANK", str(axis.rank))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    module = _module(task)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.sequences,
        "gradient_accumulation_steps": task.micro_batches,
        "gradient_clipping": task.clip or 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": task.bf16},
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(inputs: Inputs) -> Tensor:
        for micro_batch in inputs:
            loss: Tensor = engine(*micro_batch)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


# ---- the loop ----


def _module(task: Task) -> nn.Module:
    return task.build().bfloat16() if task.bf16 else task.build()


def _loop(
    task: Task,
    module: nn.Module,
    accumulate: Callable[[], AbstractContextManager[None]],
    update: Callable[[], object],
    zero_grad: Callable[[], object],
) -> Step:
    def step(inputs: Inputs) -> Tensor:
        for number, micro_batch in enumerate(inputs, 1):
            with accumulate() if number < len(inputs) else nullcontext():
                loss: Tensor = module(*micro_batch)
                (loss / task.micro_batches if task.micro_batches > 1 else loss).backward()
        update()
        zero_grad()
        return loss.detach()

    return step
