"""The layouts of a number of ranks, and a small run that all of them must agree on.

What is trained in every layout of its size is one small model; more models, and changes of the layout on the way,
are the lattice's (``integration_tests/lattice``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardweave.comm import Mesh
from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.reading import load_config
from shardweave.launcher.statistics import StepStatistics
from shardweave.launcher.trainer import Record, train_in_process

__all__ = [
    "FAMILIES",
    "Layout",
    "compare",
    "compare_statistics",
    "dataset_of",
    "layouts",
    "one_stage_each",
    "small_run",
    "train",
    "train_each",
    "tried",
]

SMALL_RUN: Mapping[str, Any] = {
    # Nothing is a round number that hides a mistake: a vocabulary of 259 over 2, 4 and 8 ranks, fewer KV heads than
    # ranks, dropout, and blocks that stages do not get equally many of (`Layout.layers`).
    "run.steps": 10,
    "model.hidden": 32,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.vocab": 259,
    "model.sequence": 16,
    "model.dropout": 0.1,
    "batch.global": 8,
    "optimizer.warmup": 3,
    "precision": "fp64",
}
"""Settings of the run that every layout must agree on."""

NO_GRADIENT = ("key.bias", "key_norm.bias")
"""How names end of which the gradient is zero in theory, see `compare`."""

TRAVELLED = 5e-3
"""About the sum of the learning rates of five to ten steps: how far Adam moves a parameter at the most."""


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "llama-like": {
        "model__position": "rotary",
        "model__norm": "rmsnorm",
        "model__qk_norm": True,
        "model__activation": "swiglu",
        "model__embedding_norm": False,
        "model__tie_embeddings": False,
        "model__ffn": 44,
    },
    "gpt-like": {
        "model__position": "learned",
        "model__embedding_norm": False,
        "model__kv_heads": 8,
        "model__attention_dropout": 0.1,
    },
    "mixtral-like": {
        "model__position": "rotary",
        "model__norm": "rmsnorm",
        "model__activation": "swiglu",
        "model__embedding_norm": False,
        "model__tie_embeddings": False,
        "model__ffn": 20,
        "model__experts": 4,
        "model__z_loss": 0.01,
        "model__router_bias": 0.01,
    },
    "switch-like": {
        "model__ffn": 21,
        "model__experts": 4,
        "model__experts_per_token": 1,
        "model__expert_capacity": 1.0,
        "model__balance_loss": 0.1,
    },
}
"""Model families, as changes to the small run."""


@dataclass(frozen=True)
class Layout:
    """One way to lay the run out."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    schedule: str = "1f1b"
    stage: int = 0
    context: int = 1
    expert: int = 1
    chunks: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def settings(self) -> dict[str, Any]:
        """As configuration overrides."""
        return {
            "parallel.data": self.data,
            "parallel.tensor": self.tensor,
            "parallel.pipeline": self.pipeline,
            "parallel.context": self.context,
            "parallel.expert": self.expert,
            "parallel.sequence": self.sequence,
            "parallel.schedule": self.schedule,
            "parallel.chunks": self.chunks,
            "zero.stage": self.stage,
            "batch.micro": self.micro,
            "model.layers": self.layers,
        }

    @property
    def layers(self) -> int:
        """Two blocks, or one more than there are stages: uneven, and as few as show it.

        Ranks outnumber cores, so a run takes as long as its ranks have collectives, and each block has a dozen.
        """
        return self.pipeline + 1

    @property
    def micro(self) -> int:
        """A micro-batch size that gives two micro-batches, or four in a pipeline, as far as eight samples go.

        Half as many at stages 0 and 2: it differs between layouts on purpose, as what is trained must not depend on it.
        """
        several = 2 if self.stage == 1 else 1
        return max(1, 8 // (self.data * several * (2 if self.pipeline > 1 else 1)))

    def __str__(self) -> str:
        tensor = f"tp{self.tensor}{'+sp' if self.sequence else ''}"
        pipeline = f"pp{self.pipeline}" + (f" {self.schedule}" if self.pipeline > 1 else "")
        pipeline += f" × {self.chunks}" if self.chunks > 1 else ""
        context = f" cp{self.context}" if self.context > 1 else ""
        experts = f" ep{self.expert}" if self.expert > 1 else ""
        return f"dp{self.data}{experts} {tensor} {pipeline}{context} zero{self.stage}"


def layouts(ranks: int) -> Iterator[Layout]:
    """Every layout of so many ranks out of dp, tp (with and without sequence parallelism), pp and ZeRO stage."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tensor in sizes:
        for pipeline in sizes:
            data, rest = divmod(ranks, tensor * pipeline)
            if rest or not data:
                continue
            for sequence in (False, True) if tensor > 1 else (False,):
                for name in ("gpipe", "1f1b") if pipeline > 1 else ("1f1b",):
                    for stage in (0, 1, 2, 3):
                        yield Layout(data, tensor, pipeline, sequence, name, stage)


def one_stage_each(chosen: Iterable[Layout]) -> list[Layout]:
    """Of layouts that differ in their ZeRO stage only, one, taking turns; each round begins one later, as the layouts
    come in fours themselves."""
    rest = dict.fromkeys(replace(layout, stage=0) for layout in chosen)
    return [replace(layout, stage=(number + number // 4) % 4) for number, layout in enumerate(rest)]


def tried(ranks: int) -> list[Layout]:
    """The layouts of so many ranks that the tests try: all; of four each under one stage, of eight every other one."""
    chosen = list(layouts(ranks))
    return chosen if ranks < 4 else one_stage_each(chosen)[:: 1 if ranks == 4 else 2]


def small_run(layout: Layout | None = None, **settings: Any) -> Config:
    """The configuration of the small run; ``settings`` with ``__`` for the dots override it."""
    chosen = {**SMALL_RUN, **(layout.settings if layout else {})}
    chosen.update({name.replace("__", "."): value for name, value in settings.items()})
    return configured(chosen)


def configured(settings: Mapping[str, Any]) -> Config:
    """A configuration from settings by dotted path."""
    return load_config(None, [f"{name}={_yaml(value)}" for name, value in settings.items()])


def dataset_of(config: Config) -> Dataset:
    """What a run trains on; reading it takes longer than a step, so runs of the same samples share it."""
    return open_dataset(config, config.model.sequence)


def train(layout: Layout, **settings: Any) -> Record:
    """Trains the small run in this process' world, which has as many ranks as the layout."""
    [record] = train_each([layout], **settings)
    return record


def train_each(chosen: Iterable[Layout], **settings: Any) -> Iterator[Record]:
    """Trains the small run in one layout after the other, on the same ranks and over the same samples."""
    dataset = dataset_of(small_run(**settings))
    for layout in chosen:
        config = small_run(layout, **settings)
        mesh = Mesh(dp=layout.data, tp=layout.tensor, pp=layout.pipeline, cp=layout.context, ep=layout.expert)
        try:
            yield train_in_process(config, mesh, config.run.steps, dataset=dataset)
        finally:
            mesh.close()


def compare(record: Record, right: Record, tolerance: float) -> list[str]:
    """What is not equal, in words: losses and norms relatively, parameters by each tensor's largest entry.

    A key bias, or that of a key norm, adds the same to all scores of a query, which softmax does not see (except under
    rotary positions): its gradient is zero in theory and rounding noise in practice, which Adam scales up. So for it
    "largest entry" is at least the distance that Adam can have moved anything.
    """
    wrong = []
    for name, ours, theirs in (
        ("loss", record.losses, right.losses),
        ("norm", record.grad_norms, right.grad_norms),
    ):
        apart = [abs(a - b) / max(b, 1e-300) for a, b in zip(ours, theirs, strict=True)]
        beyond = [step for step, value in enumerate(apart) if not value <= tolerance]  # NaN, too
        if beyond:
            step = beyond[0]
            wrong.append(f"{name} parts at step {step}: {ours[step]} for {theirs[step]}")
    wrong += compare_statistics(record.statistics, right.statistics, tolerance, of_largest=True)
    if record.parameters.keys() != right.parameters.keys():
        wrong.append(f"other parameters: {sorted(record.parameters.keys() ^ right.parameters.keys())}")
        return wrong
    for name, theirs_full in right.parameters.items():
        scale = theirs_full.abs().max()
        if name.endswith(NO_GRADIENT):
            scale = scale.clamp_min(TRAVELLED)
        apart_by = (record.parameters[name] - theirs_full).abs().max() / scale
        if not apart_by <= tolerance:
            wrong.append(f"{name} is {apart_by:.1e} of its largest entry away")
    return wrong


def compare_statistics(
    found: Sequence[StepStatistics],
    right: Sequence[StepStatistics],
    tolerance: float,
    *,
    of_largest: bool = False,
) -> list[str]:
    """What is not equal in the statistics of some steps, in words: relatively, and fractions of zeros exactly.

    What is zero in theory (see `compare`) is measured by the largest gradient; with ``of_largest`` all are. For after
    some steps of Adam small gradients are further apart than the norm, which large ones make: those before norms of two
    numbers, as the lattice has them, by 2e-8 of themselves where the norm is by 3e-12. That one is counted twice, left
    out, or divided by another number, shows all the same.
    """
    if len(found) != len(right):
        return [f"statistics of {len(found)} steps for {len(right)}"]
    wrong = []
    for mine, theirs in zip(found, right, strict=True):
        for ours, expected in ((mine.gradients, theirs.gradients), (mine.activations, theirs.activations)):
            if list(ours) != list(expected):
                wrong.append(f"statistics of {list(ours)} for {list(expected)}")
                continue
            largest = max((one.rms for one in expected.values()), default=0.0)
            for name, its in expected.items():
                is_noise = name.endswith(NO_GRADIENT)
                least = max(largest if is_noise or of_largest else 0.0, 1e-300)
                apart = [
                    abs(a - b) / max(b, least)
                    for a, b in ((ours[name].rms, its.rms), (ours[name].max, its.max))
                ]
                same = ours[name].count == its.count and (is_noise or ours[name].zeros == its.zeros)
                if not same or not all(value <= tolerance for value in apart):  # NaN, too
                    wrong.append(f"statistics of {name}: {ours[name]} for {its}")
    return wrong


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
