"""What a step cost: time, communication and memory, of the worst rank, from this rank's clock and ledger.

A step is as slow as its slowest rank, and a rank that sends more than the others is what one looks for; so the
numbers are maxima over ranks, taken with one small collective after each step (which the step's own numbers leave
out).
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from shardweave.comm import all_reduce
from shardweave.launcher.metrics import StepMetrics, peak_flops
from shardweave.launcher.shape import step_flops
from shardweave.launcher.trainer import StepResult, Trainer
from shardweave.models import RouterStatistics

__all__ = ["Meter"]

_AXES = (
    "pp", "dp", "cp", "tp", "data", "model", "world", "replica", "shard", "ep", "expert_data", "expert_shard",
)  # fmt: skip
"""All axes that a step may communicate on: the columns of the collective, the same on every rank."""


class Meter:
    """Measures the steps of one trainer. Every rank has one and calls it around every step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        parts = trainer.parts
        self._flops = step_flops(trainer.config, parts.shape, parts.plan.global_batch)
        self._peak = peak_flops(_device_name(parts.device), trainer.config.precision)
        self.start()

    def start(self) -> None:
        """The step begins."""
        ledger = self._trainer.mesh.ledger
        self._traffic, self._crossed = ledger.by_axis(), ledger.total(link="network").sent
        self._began = time.perf_counter()

    def stop(self, result: StepResult) -> StepMetrics:
        """The step is done; the same numbers on every rank."""
        seconds = time.perf_counter() - self._began
        ledger = self._trainer.mesh.ledger
        before, after = self._traffic, ledger.by_axis()
        spent = {axis: after[axis] - before[axis] if axis in before else after[axis] for axis in after}
        mine = [
            seconds,
            # Operations that are under way together add up to more than the step: no rank communicates longer.
            min(seconds, sum(traffic.seconds for traffic in spent.values())),
            min(seconds, sum(traffic.exposed for traffic in spent.values())),
            _memory(self._trainer.parts.device),
            float(ledger.total(link="network").sent - self._crossed),
            self._trainer.data_seconds,
            *(float(spent[axis].sent) if axis in spent else 0.0 for axis in _AXES),
        ]
        device = self._trainer.parts.device
        worst = torch.tensor(mine, dtype=torch.float64, device=device)
        worst = all_reduce(worst, self._trainer.mesh.world, "max")
        seconds, comm, exposed, memory, crossed, waited, *sent = worst.tolist()
        seconds_of_all = seconds * self._trainer.mesh.world.size
        per_device = self._flops.model / seconds_of_all
        return StepMetrics(
            step=result.step,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            step_seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            tflops_per_device=per_device / 1e12,
            tflops_hardware_per_device=self._flops.hardware / seconds_of_all / 1e12,
            mfu=None if self._peak is None else per_device / self._peak,
            comm_seconds=comm,
            comm_exposed_seconds=exposed,
            comm_fraction=exposed / seconds,
            comm_bytes={axis: int(count) for axis, count in zip(_AXES, sent, strict=True) if count},
            data_seconds=waited,
            memory_gib=memory / 2**30,
            skipped=result.skipped,
            extra=self._extra(result, crossed),
        )

    def _extra(self, result: StepResult, crossed: float) -> dict[str, Any]:
        """What only some runs have."""
        scale = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
        several = self._trainer.mesh.topology.num_nodes > 1
        return {
            **scale,
            **({} if result.head_z_loss is None else {"head_z_loss": result.head_z_loss}),
            **({} if result.routers is None else _of_routers(result.routers)),
            **({"network_bytes": int(crossed)} if several else {}),
            **({} if result.statistics is None else {"statistics": result.statistics.record()}),
        }


def _of_routers(seen: RouterStatistics) -> dict[str, float]:
    """A few numbers: layers and experts are many."""
    return {
        "auxiliary_loss": seen.loss,
        "balance_loss": float(seen.balance_loss.mean()),
        "z_loss": float(seen.z_loss.mean()),
        "expert_load": float(seen.load.max()),
        "dropped_share": seen.dropped_share,
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _memory(device: torch.device) -> float:
    """Peak bytes: what the allocator handed out on an accelerator, what the process had resident on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
