"""Step time and bytes of ZeroOptimizer beside torch's own: DDP, ZeroRedundancyOptimizer, FSDP2.

All ways train the same GPT-like model (4 layers, hidden 256, vocabulary 4096, 5.3 M fp32 parameters) on the same
data, in the same processes, interleaved in rounds, so that load on the machine hits all of them alike. ``cpu`` is
processor time of one rank, all its threads: the figure that other processes on the machine disturb least.

    python packages/zero/bench/step_time.py --ranks 2 --rounds 5 --steps 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.comm import Axis, Mesh
from shardweave.comm.testing import run_ranks
from shardweave.zero import ZeroOptimizer

__all__ = ["measure"]

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, SEQUENCES = 4, 256, 4, 128, 4096, 8

# ZeroOptimizer chooses the fused implementation by itself.
CHOICES: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {}}

Step = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """The model of all measurements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _loop(module: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _torch_ways(axis: Axis) -> dict[str, Step]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ways: dict[str, Step] = {}
    settings: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}
    for label, arguments in settings.items():
        ddp = nn.parallel.DistributedDataParallel(GPT(), process_group=axis.group)
        ways[f"DDP, AdamW {label}"] = _loop(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3, **arguments))
        ddp = nn.parallel.DistributedDataParallel(GPT(), process_group=axis.group)
        redundancy = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, **arguments)
        ways[f"DDP, ZeroRedundancyOptimizer {label}"] = _loop(ddp, redundancy)
    for reshard in (False, True):
        model = GPT()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        ways[f"FSDP2 reshard={reshard}, AdamW fused"] = _loop(model, optimizer)
    return ways


def _ways(axis: Axis, bucket_mb: float) -> dict[str, Step]:
    ways = _torch_ways(axis)
    for stage in (0, 1, 2):
        for label, chosen in CHOICES.items():
            model = GPT()
            optimizer = ZeroOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                data=axis,
                stage=stage,
                bucket_mb=bucket_mb,
                lr=1e-3,
                **chosen,
            )
            ways[f"ours, stage {stage}, AdamW {label}"] = _loop(model, optimizer)
    return ways


def measure(ranks: int, rounds: int, steps: int, bucket_mb: float) -> dict[str, dict[str, float]]:
    """On every rank: by way of training the median step and CPU time in ms, the MiB sent, the last loss."""
    mesh = Mesh(dp=ranks)
    ways = _ways(mesh.data, bucket_mb)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    own = SEQUENCES // ranks
    batches = [
        torch.randint(VOCABULARY, (own, SEQUENCE + 1), generator=generator) for _ in range(rounds * steps + 2)
    ]
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for step in ways.values():
        for batch in batches[-2:]:
            step(batch[:, :-1], batch[:, 1:])
    for number in range(rounds):
        for way, step in ways.items():
            for batch in batches[number * steps : (number + 1) * steps]:
                sent = mesh.ledger.total().sent
                wall, cpu = time.perf_counter(), time.process_time()
                losses[way] = float(step(batch[:, :-1], batch[:, 1:]).detach())
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                times[way].append((wall, cpu, mesh.ledger.total().sent - sent))
    return {
        way: {
            "step_ms": 1e3 * statistics.median(entry[0] for entry in entries),
            "best_ms": 1e3 * min(entry[0] for entry in entries),
            "cpu_ms": 1e3 * statistics.median(entry[1] for entry in entries),
            "sent_mib": statistics.median(entry[2] for entry in entries) / 2**20,
            "loss": losses[way],
        }
        for way, entries in times.items()
    }


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bucket-mb", type=float, default=25)
    chosen = parser.parse_args()
    found = run_ranks(
        measure, chosen.ranks, chosen.ranks, chosen.rounds, chosen.steps, chosen.bucket_mb, timeout=900
    )
    base = found[0]["DDP, AdamW foreach"]
    print(f"{'':44}{'step':>8}{'best':>8}{'cpu':>8}{'sent':>7}  loss   step, cpu against DDP foreach")
    for way, row in found[0].items():
        sent = f"{row['sent_mib']:7.2f}" if row["sent_mib"] else "      -"
        ratios = f"{row['step_ms'] / base['step_ms']:.2f}  {row['cpu_ms'] / base['cpu_ms']:.2f}"
        numbers = "".join(f"{row[key]:8.1f}" for key in ("step_ms", "best_ms", "cpu_ms"))
        print(f"{way:44}{numbers}{sent}  {row['loss']:.4f} {ratios}")


if __name__ == "__main__":
    main()
