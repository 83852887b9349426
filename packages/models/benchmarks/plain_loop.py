"""Time of a training step on one rank, over that of a plain PyTorch GPT in a plain loop.

The peer is what one would write without any library: ``nn.Linear``, ``nn.LayerNorm``, one product for queries, keys
and values, torch's attention, ``F.cross_entropy``, ``clip_grad_norm_`` and torch's AdamW, batch first. Beside it, of
the same shape, on the same tokens and with the same implementation of AdamW: a :class:`Transformer` in the same loop,
and the launcher's :meth:`Trainer.train_step` on one rank, which also draws its samples and reports loss and norm, and
writes nothing. Steps take turns in one process.

    python -m packages.models.benchmarks.plain_loop [--batch 4 8] [--rounds 25] [--stages] [--foreach] [--processor]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import Tensor, nn
from torch.nn import functional

from shardweave.comm import Mesh
from shardweave.launcher import Trainer, load_config
from shardweave.models import Transformer, TransformerConfig

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB = 4, 256, 8, 256, 256
RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
LIMIT = 1.03
STAGES = ("forward", "loss", "backward", "clip", "update")
WARM = 3

Clock = Callable[[], float]


class PlainBlock(nn.Module):
    """A block as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attend, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h]`` to the same."""
        batch, length, _ = x.shape
        parts = self.attend(self.first(x)).split(HIDDEN, dim=-1)
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        y: Tensor = x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))
        return y


class PlainGPT(nn.Module):
    """Learned positions, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[b, s]`` to logits ``[b, s, vocab]``."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


class Loop:
    """One model in a plain loop; notes how long the stages of its steps take."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        batches: Callable[[], tuple[Tensor, Tensor]],
        *,
        fused: bool,
        clock: Clock,
    ) -> None:
        self.module, self.loss, self.batches, self.clock = module, loss, batches, clock
        self.optimizer = torch.optim.AdamW(
            module.parameters(), RATE, BETAS, weight_decay=DECAY, fused=fused, foreach=not fused
        )
        self.seen: list[list[float]] = []
        """Seconds of each stage, of every step so far."""

    def step(self) -> None:
        """One optimizer step."""
        inputs, targets = self.batches()
        marks = [self.clock()]
        output = self.module(inputs)
        marks.append(self.clock())
        loss = self.loss(output, targets)
        marks.append(self.clock())
        loss.backward()
        marks.append(self.clock())
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        marks.append(self.clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.clock())
        self.seen.append([after - before for before, after in itertools.pairwise(marks)])


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ways(batch: int, *, fused: bool, clock: Clock) -> tuple[Loop, Loop, Trainer]:
    """The plain model, ours in the same loop, and the launcher's trainer."""
    drawn = torch.randint(VOCAB, (batch, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))

    def batches() -> tuple[Tensor, Tensor]:
        return drawn[:, :-1], drawn[:, 1:]

    config = TransformerConfig(
        layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, sequence=SEQUENCE, activation="gelu_tanh"
    )
    ours = Transformer(config)
    overrides = {
        "model.layers": LAYERS, "model.hidden": HIDDEN, "model.heads": HEADS, "model.sequence": SEQUENCE,
        "model.position": "learned", "model.embedding_norm": "false", "model.activation": "gelu_tanh",
        "batch.global": batch, "batch.micro": batch,
    }  # fmt: skip

    def our_loss(output: Tensor, targets: Tensor) -> Tensor:
        return ours.loss(output, targets) / targets.numel()

    settings = load_config(None, [f"{key}={value}" for key, value in overrides.items()])
    return (
        Loop(PlainGPT(), plain_loss, batches, fused=fused, clock=clock),
        Loop(ours, our_loss, batches, fused=fused, clock=clock),
        Trainer(settings, Mesh()),
    )


def measure(steps: Mapping[str, Callable[[], object]], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each way's steps, in turns; whoever begins a round changes."""
    names = list(steps)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = clock()
            steps[name]()
            if number >= WARM:
                found[name].append(clock() - began)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8], help="sequences a step")
    parser.add_argument("--rounds", type=int, default=25, help="steps of each way")
    parser.add_argument("--stages", action="store_true", help="where a step's time goes")
    parser.add_argument("--foreach", action="store_true", help="AdamW's other implementation, in both loops")
    parser.add_argument(
        "--processor", action="store_true", help="this thread's processor time, beside other work"
    )
    given = parser.parse_args()
    clock = time.thread_time if given.processor else time.perf_counter
    torch.set_num_threads(1)
    whole: list[dict[str, Value]] = []
    parts: list[dict[str, Value]] = []
    for batch in given.batch:
        plain, ours, trainer = ways(batch, fused=not given.foreach, clock=clock)
        steps = {"plain": plain.step, "Transformer": ours.step, "Trainer": trainer.train_step}
        found = measure(steps, given.rounds, clock)
        whole += [_row(batch, name, found[name], found["plain"]) for name in steps]
        parts += _stage_rows(batch, plain, ours)
    tables = [
        Table(
            f"a training step of {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, {SEQUENCE} tokens, fp32, one thread; "
            "milliseconds, and over the plain loop",
            whole,
        )
    ]
    if given.stages:
        tables.append(Table("where it goes: medians of milliseconds", parts))
    report(tables, given.json)


def _row(batch: int, name: str, seconds: Sequence[float], plain: Sequence[float]) -> dict[str, Value]:
    ratio = statistics.median(seconds) / statistics.median(plain)
    return {
        "batch": batch,
        "what": name,
        "median": statistics.median(seconds) * 1e3,
        "least": min(seconds) * 1e3,
        "ratio of medians": round(ratio, 4),
        "of the least": round(min(seconds) / min(plain), 4),
        "asked": "" if seconds is plain else verdict(round(ratio, 4), LIMIT),
    }


def _stage_rows(batch: int, plain: Loop, ours: Loop) -> list[dict[str, Value]]:
    return [
        {
            "batch": batch,
            "stage": stage,
            "plain": _median(plain, number),
            "Transformer": _median(ours, number),
            "above": round(_median(ours, number) - _median(plain, number), 2),
        }
        for number, stage in enumerate(STAGES)
    ]


def _median(loop: Loop, stage: int) -> float:
    return round(statistics.median(step[stage] for step in loop.seen[WARM:]) * 1e3, 2)


if __name__ == "__main__":
    main()
