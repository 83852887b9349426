"""The loss of each position at twice the trained length, with ALiBi, rotary and learned positions.

The same small model is trained three times on the built-in text in windows of 64 bytes, on the same windows in the same
order, and evaluated on text that it has not seen in windows of 128. Learned positions have a table of 128 of which the
second half was never trained. What is compared with the trained length are its last 32 positions: the first ones know
less of what comes before them.

    python -m packages.models.benchmarks.beyond [--steps 400] [--json FILE]
"""

from __future__ import annotations

from typing import Literal

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import Tensor
from torch.nn import functional

from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.tokenizer import ByteTokenizer
from shardweave.models import Transformer, TransformerConfig

TRAINED, BATCH, RATE, BUCKET, WINDOWS = 64, 16, 3e-3, 32, 256
POSITIONS: tuple[Literal["alibi", "rotary", "learned"], ...] = ("alibi", "rotary", "learned")
LIMIT = 1.02


def windows(text: Tensor, number: int, length: int, seed: int) -> Tensor:
    """``[number, length + 1]`` tokens from places that the seed draws."""
    starts = torch.randint(len(text) - length - 1, (number,), generator=torch.Generator().manual_seed(seed))
    return text[starts.unsqueeze(1) + torch.arange(length + 1)]


def trained(position: Literal["alibi", "rotary", "learned"], text: Tensor, steps: int) -> Transformer:
    """A model that has seen ``steps`` batches of windows of the trained length."""
    config = TransformerConfig(
        layers=2,
        hidden=64,
        heads=4,
        vocab=256,
        sequence=2 * TRAINED,
        position=position,
        activation="gelu_tanh",
    )
    model = Transformer(config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        batch = windows(text, BATCH, TRAINED, step)
        loss = model.loss(model(batch[:, :-1]), batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def by_position(model: Transformer, text: Tensor) -> Tensor:
    """Mean loss of each position, ``[2 * TRAINED]``."""
    seen = windows(text, WINDOWS, 2 * TRAINED, 1 << 20)
    logits = model(seen[:, :-1]).transpose(0, 1)  # [b, s, vocab]
    each = functional.cross_entropy(logits.flatten(0, 1), seen[:, 1:].flatten(), reduction="none")
    return each.view(WINDOWS, -1).mean(0)


def main() -> None:
    """Prints a row for each kind of positions."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus = open_corpus("builtin", ByteTokenizer())
    text = torch.from_numpy(corpus.read(0, len(corpus)).astype("int64"))
    cut = len(text) * 95 // 100
    rows: list[dict[str, Value]] = []
    for position in POSITIONS:
        losses = by_position(trained(position, text[:cut], given.steps), text[cut:])
        parts = losses.view(-1, BUCKET).mean(1).tolist()
        beyond = losses[TRAINED:].mean().item() / parts[TRAINED // BUCKET - 1]
        places = {
            f"{number * BUCKET} to {(number + 1) * BUCKET - 1}": part for number, part in enumerate(parts)
        }
        asked = verdict(round(beyond, 4), LIMIT) if position == "alibi" else ""
        rows.append(
            {"positions": position, **places, "beyond / end of trained": round(beyond, 3), "asked": asked}
        )
    title = f"loss by position, nats a byte; trained on {TRAINED} positions, {given.steps} steps"
    report([Table(title, rows)], given.json)


if __name__ == "__main__":
    main()
