"""Compiled blocks with tensor, sequence and pipeline parallelism and ZeRO, against one process that compiles nothing.

Compiling takes minutes, so the suite leaves it to ``nox -s lattice`` (``python -m integration_tests.compiled``). The
layouts are compiled as autograd cuts them (``aot_eager``): whatever is wrong with hooks, gathered parameters, put-off
gradients and recomputation shows there. One process has the real compiler, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from integration_tests.layouts import Layout, compare, dataset_of, small_run, train

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.launcher.trainer import Record, Trainer, recorded
from shardweave.models import Transformer

SETTINGS: dict[str, Any] = {"run__steps": 3, "optimizer__warmup": 1, "model__layers": 3}

Way = tuple[Layout, Mapping[str, Any], str]
"""A layout, further settings, and the backend."""

WAYS: tuple[Way, ...] = (
    (Layout(4, 1, 1, stage=3), {}, "aot_eager"),
    (Layout(2, 2, 1, sequence=True, stage=3), {"recompute": "selective"}, "aot_eager"),
    (Layout(1, 2, 2, sequence=True, schedule="zb-h1"), {}, "aot_eager"),
    (Layout(2, 1, 2, schedule="zb-v", stage=3), {}, "aot_eager"),
    (Layout(2, 2, 1, stage=1), {"recompute": "selective", "model__attention_dropout": 0.1}, "aot_eager"),
    (Layout(2, 1, 1, context=2), {"model__position": "rotary"}, "aot_eager"),
    (Layout(1, 1, 1), {}, "inductor"),
)


def train_compiled(ways: Sequence[Way]) -> list[Record]:
    """The small run in one way after the other; a rank's part."""
    records = []
    for layout, others, backend in ways:
        config = small_run(layout, **{**SETTINGS, **others, "compile": True})
        mesh = Mesh(dp=layout.data, tp=layout.tensor, pp=layout.pipeline, cp=layout.context)
        compile_blocks = functools.partialmethod(Transformer.compile_blocks, backend=backend)
        with patch.object(Transformer, "compile_blocks", compile_blocks):
            trainer = Trainer(config, mesh, dataset=dataset_of(config))
        assert all(
            block._compiled_call_impl is not None
            for module in trainer.parts.modules
            for block in module.layers.values()
        )
        records.append(recorded(trainer, config.run.steps))
        mesh.close()
    return records


def differences(way: Way) -> list[str]:
    """What is not equal to one process that compiles nothing."""
    layout, others, _ = way
    shape = {name: value for name, value in others.items() if name.startswith("model")}
    right = run_ranks(train, 1, Layout(), **SETTINGS, **shape)[0]
    [record] = run_ranks(train_compiled, layout.ranks, [way], timeout=900)[0]
    return compare(record, right, 1e-9)


def main() -> int:
    """All of them, or those whose numbers are given; exit status 1 when one parts."""
    chosen = [WAYS[int(number)] for number in sys.argv[1:]] or list(WAYS)
    wrong = 0
    for way in chosen:
        found = differences(way)
        wrong += bool(found)
        layout, others, backend = way
        print(f"{layout} {dict(others)} {backend}: {'; '.join(found) or 'equal'}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
