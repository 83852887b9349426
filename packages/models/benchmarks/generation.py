"""Tokens a second of ``generate``, with a cache and without, where a text has 256 and 1024 tokens.

12 layers, hidden 256, 4 heads of 64, in fp32, one row of bytes, on one thread. The text but its last 16 tokens is given
(one pass: the prefill, timed apart), these are generated. Seconds are the processor's, the least of some rounds: what
else the machine does then counts least. ``python -m packages.models.benchmarks.generation [--rounds 2]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from shardweave.models import Transformer, TransformerConfig, cache_bytes, generate, make_cache

__all__ = ["main"]

NEW = 16
POSITIONS: tuple[Literal["rotary", "alibi"], ...] = ("rotary", "alibi")


def main() -> None:
    """Prints a row for each kind of positions and each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"least of {rounds} rounds, by the processor's time on one thread")
    print("positions  length  prefill tokens/s  with cache tokens/s  without tokens/s  ratio  cache MiB")
    for position in POSITIONS:
        config = TransformerConfig(
            layers=12, hidden=256, heads=4, vocab=256, sequence=1024, position=position
        )
        model = Transformer(config, seed=1).eval()
        for length in (256, 1024):
            prompt = torch.randint(256, (1, length - NEW), generator=torch.Generator().manual_seed(2))
            first, kept, without = _measured(model, prompt, rounds)
            print(
                f"{position:9}  {length:6}  {prompt.shape[1] / first:16.0f}  {(NEW - 1) / (kept - first):19.1f}  "
                f"{NEW / without:16.1f}  {without / NEW / ((kept - first) / (NEW - 1)):5.1f}  "
                f"{cache_bytes(config, 1, 1, length) / 2**20:9.1f}"
            )


@torch.no_grad()
def _measured(model: Transformer, prompt: torch.Tensor, rounds: int) -> tuple[float, float, float]:
    """Seconds of the prefill, of a text with a cache, and of one without, in rounds that take turns."""

    def prefill() -> None:
        model(prompt, cache=make_cache([model], 1, prompt.shape[1]), last_only=True)

    works = [prefill, lambda: generate(model, prompt, NEW), lambda: generate(model, prompt, NEW, cache=False)]
    times = list(zip(*_rounds(works, rounds), strict=True))
    first, kept, without = (min(one) for one in times)
    return first, kept, without


def _rounds(works: Sequence[Callable[[], object]], rounds: int) -> Iterator[list[float]]:
    for turn in range(rounds + 1):
        row = []
        for work in works:
            began = time.process_time()
            work()
            row.append(time.process_time() - began)
        if turn:  # the first is a warm-up
            yield row


if __name__ == "__main__":
    main()
