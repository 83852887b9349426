"""How long the first micro-batch of a corpus takes, and how much memory its process has had, torch and all.

``python -m packages.launcher.tests.first_batch PREFIX`` prints both as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.data.order import SampleOrder
from shardweave.launcher.data.tokenizer import ByteTokenizer

__all__ = ["main"]


def main(prefix: str) -> None:
    """From the opening to the batch; what is imported is not counted in its seconds, but in its bytes."""
    begin = time.perf_counter()
    dataset = Dataset.cut(open_corpus(prefix, ByteTokenizer()), 2048, 0.01, separate_documents=True)
    batch = dataset.micro_batch(SampleOrder(dataset.num_train, seed=1).samples(0, 16))
    seconds = time.perf_counter() - begin
    assert batch.inputs.shape == (16, 2048)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    print(json.dumps({"seconds": seconds, "mb": peak * 1024 / 1e6}))


if __name__ == "__main__":
    main(sys.argv[1])
