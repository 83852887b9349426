"""How many ranks, who is where, and which samples each of them computes: pure arithmetic, before any rank starts.

The ranks of a layout form a grid. Tensor ranks are neighbours (they talk most, so they share a node), then context,
then data, and pipeline stages are farthest apart. For dp2 × tp2 × pp2::

    stage 0        tp 0   tp 1        stage 1        tp 0   tp 1
      dp 0           0      1           dp 0           4      5
      dp 1           2      3           dp 1           6      7

A layout that does not fit the model or the batch is refused here, with the numbers and the choices that would fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from shardweave.launcher.config import Config
from shardweave.launcher.problems import ConfigError, Problem, alternatives, divisors
from shardweave.models import TransformerConfig
from shardweave.pipeline import RULES

__all__ = [
    "BatchPlan", "Layout", "batch_plan", "check_fit", "layout_of", "schedule_of", "stages_per_rank",
]  # fmt: skip

MAX_ACCUMULATION = 10_000
"""Micro-batches a step: schedules list every one of them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the mesh's axes."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Neighbours among the data ranks that have different experts: a part of `data`, not a number of further ranks."""

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data * self.model

    @property
    def sharing(self) -> int:
        """Ranks whose gradients are added up and over which ZeRO shards: each has other tokens of the batch."""
        return self.data * self.context

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank sits: its position on each axis; on ``ep``, too, where experts are spread."""
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        pipeline, data = divmod(rank, self.data)
        experts = {"ep": data % self.expert} if self.expert > 1 else {}
        return {"pp": pipeline, "dp": data, "cp": context, "tp": tensor, **experts}

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The global rank at some coordinates."""
        return ((pp * self.data + dp) * self.context + cp) * self.tensor + tp

    def sizes(self) -> dict[str, int]:
        """The axes and their sizes, as a checkpoint records them; ``ep`` is a part of ``dp``."""
        plain = {"pp": self.pipeline, "dp": self.data, "cp": self.context, "tp": self.tensor}
        return {**plain, "ep": self.expert}

    def __str__(self) -> str:
        experts = f" (ep{self.expert})" if self.expert > 1 else ""
        text = f"dp{self.data}{experts} × tp{self.tensor} × pp{self.pipeline}"
        return text if self.context == 1 else f"{text} × cp{self.context}"


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One optimizer step's sequences: ``global_batch = micro * accumulation * data``."""

    global_batch: int
    micro: int
    accumulation: int
    """Micro-batches that every data rank computes per step."""
    data: int

    def __str__(self) -> str:
        parts = f"{self.micro} micro × {self.accumulation} accumulation × {self.data} data"
        return f"{self.global_batch} sequences = {parts}"


def layout_of(config: Config, world_size: int | None = None) -> Layout:
    """The layout of a run. `world_size` is the number of ranks at hand; None: as many as the layout names, with one
    data rank, or one for each part of the experts, where their number is auto.

    Raises:
        ConfigError: when the ranks at hand and the layout do not match.
    """
    block = config.parallel
    expert = block.expert if config.model.experts else 1  # else it has no effect, which a warning says
    model = block.tensor * block.pipeline * block.context
    names = [("data", block.data), ("tensor", block.tensor), ("pipeline", block.pipeline)]
    if block.context > 1:
        names.append(("context", block.context))
    product = " × ".join(f"parallel.{name}: {value}" for name, value in names if value != "auto")
    if block.data != "auto":
        data = block.data
        if world_size not in (None, data * model):
            text = f"the layout needs {data * model} ranks ({product}), and {world_size} were started"
            remedy = f"start {data * model}"
            if world_size is not None and world_size % model == 0:
                remedy += f", or use parallel.data={world_size // model} or auto"
            raise ConfigError([Problem(("parallel", "data"), f"{text}; {remedy}")])
    elif world_size is None:
        data = expert
    else:
        data = world_size // model
        if data * model != world_size:
            text = f"{world_size} ranks were started, which is not a multiple of {model} ({product})"
            raise ConfigError([Problem(("parallel",), f"{text}; start a multiple of {model}")])
    return Layout(
        data=data, tensor=block.tensor, pipeline=block.pipeline, context=block.context, expert=expert
    )


def schedule_of(config: Config, layout: Layout) -> str:
    """The name of the schedule; of one rank, where all do the same, the plainest."""
    return config.parallel.schedule if layout.pipeline > 1 else "1f1b"


def stages_per_rank(config: Config, layout: Layout) -> int:
    """How many stages a pipeline rank has: as many as the schedule fixes, or as are asked for."""
    own = RULES[schedule_of(config, layout)].chunks
    return config.parallel.chunks if own is None else own


def batch_plan(config: Config, layout: Layout) -> BatchPlan:
    """How the global batch is cut; the accumulation follows from the other three numbers.

    Raises:
        ConfigError: when global is not a multiple of micro * data: nothing is rounded; or when these are too few
            micro-batches for the schedule.
    """
    total, micro, data = config.batch.global_, config.batch.micro, layout.data
    accumulation, rest = divmod(total, micro * data)
    if rest or not accumulation:
        below, above = accumulation * micro * data, (accumulation + 1) * micro * data
        globals_ = alternatives([f"batch.global={value}" for value in (below, above) if value])
        micros = [] if total % data else divisors(total // data, near=micro, most=6)
        other = f", or batch.micro={alternatives(micros)}" if micros else ""
        text = (
            f"`batch.global: {total}` is not a multiple of `batch.micro: {micro}` × {data} data ranks = "
            f"{micro * data} (global = micro × accumulation × data); use {globals_}{other}"
        )
        raise ConfigError([Problem(("batch", "global"), text)])
    if accumulation > MAX_ACCUMULATION:
        text = (
            f"`batch.global: {total}` is {accumulation} micro-batches a step on each of {data} data ranks, and "
            f"{MAX_ACCUMULATION} are the most; raise batch.micro or parallel.data"
        )
        raise ConfigError([Problem(("batch", "global"), text)])
    _check_micro_batches(config, layout, accumulation)
    return BatchPlan(global_batch=total, micro=micro, accumulation=accumulation, data=data)


def _check_micro_batches(config: Config, layout: Layout, accumulation: int) -> None:
    """Some schedules need more micro-batches than others.

    Raises:
        ConfigError: there are too few.
    """
    rule, total, data = RULES[schedule_of(config, layout)], config.batch.global_, layout.data
    least = rule.least(layout.pipeline)
    if accumulation >= least:
        return
    text = (
        f"`parallel.schedule: {config.parallel.schedule}` needs {least} micro-batches a step ({rule.least_text}) with "
        f"`parallel.pipeline: {layout.pipeline}`, and there are {accumulation} (`batch.global: {total}` / "
        f"`batch.micro: {config.batch.micro}` / {data} data ranks)"
    )
    micros = [
        size for size in divisors(total // data, near=config.batch.micro) if total // data // size >= least
    ]
    use = (
        f"batch.micro={alternatives(micros)}"
        if micros
        else f"batch.global={least * config.batch.micro * data}"
    )
    raise ConfigError([Problem(("parallel", "schedule"), f"{text}; use {use}, or parallel.schedule=zb-v")])


def _misfits(config: Config, layout: Layout, shape: TransformerConfig) -> Iterator[Problem]:
    tensor = layout.tensor
    where = ("parallel", "tensor")
    if shape.heads % tensor:
        text = f"`parallel.tensor: {tensor}` does not divide `model.heads: {shape.heads}`"
        yield Problem(where, f"{text}; use {alternatives(divisors(shape.heads, near=tensor))}")
    elif shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        # Fewer key and value heads than ranks: each is copied over a block of ranks of equal size.
        kv = shape.num_kv_heads
        fitting = [size for size in divisors(shape.heads, near=tensor) if kv % size == 0 or size % kv == 0]
        text = f"`parallel.tensor: {tensor}` and `model.kv_heads: {kv}` do not divide each other"
        yield Problem(where, f"{text}; use {alternatives(fitting)}")
    elif config.parallel.sequence and layout.context == 1 and shape.sequence % tensor:
        text = f"`parallel.tensor: {tensor}` does not divide `model.sequence: {shape.sequence}`, and"
        text += " `parallel.sequence: true` cuts sequences over the tensor ranks"
        yield Problem(where, f"{text}; use parallel.sequence=false or another model.sequence")
    yield from _context_misfits(config, layout, shape)
    for key, size in (("vocab", shape.vocab), ("ffn", shape.ffn_size)):
        if size < tensor:
            text = f"`parallel.tensor: {tensor}` is more than `model.{key}: {size}`"
            yield Problem(where, f"{text}: some ranks would hold nothing; use at most {size}")
    if config.zero.stage > 0 and layout.data % config.zero.replicas:
        replicas = config.zero.replicas
        text = f"`zero.replicas: {replicas}` does not divide the {layout.data} data ranks (`parallel.data`): each"
        text += (
            f" copy is sharded over equally many; use {alternatives(divisors(layout.data, near=replicas))}"
        )
        yield Problem(("zero", "replicas"), text)
    yield from _expert_misfits(config, layout, shape)
    yield from _stage_misfits(config, layout, shape)


def _stage_misfits(config: Config, layout: Layout, shape: TransformerConfig) -> Iterator[Problem]:
    """Every stage has one of the model's pieces or more: the embedding, a block, the head. And no schedule with one
    stage per rank is asked for several."""
    own = RULES[schedule_of(config, layout)].chunks
    if own == 1 and config.parallel.chunks > 1 and layout.pipeline > 1:
        several = [f"parallel.schedule={name}" for name, rule in RULES.items() if rule.chunks is None]
        text = f"`parallel.chunks: {config.parallel.chunks}` has no effect because `parallel.schedule: "
        text += f"{config.parallel.schedule}` runs one stage per rank"
        yield Problem(("parallel", "chunks"), f"{text}; use {alternatives(['parallel.chunks=1', *several])}")
    ranks, chunks, pieces = layout.pipeline, stages_per_rank(config, layout), shape.layers + 2
    if ranks * chunks <= pieces:
        return
    where, stages = ("parallel", "pipeline"), f"`parallel.pipeline: {ranks}`"
    if chunks > 1:
        fixed = (
            f"`parallel.chunks: {chunks}`"
            if config.parallel.chunks == chunks
            else f"{chunks} stages per rank"
        )
        stages += f" × {fixed} (`parallel.schedule: {schedule_of(config, layout)}`) = {ranks * chunks} stages"
    text = f"{stages} is more than the {pieces} pieces of the model (embedding, `model.layers: {shape.layers}`, head)"
    fitting = [f"parallel.pipeline={pieces // chunks}"] if pieces // chunks > 1 else []
    if RULES[schedule_of(config, layout)].chunks is None and pieces >= ranks:
        fitting.append(f"parallel.chunks={pieces // ranks}")
    elif chunks > 1 and pieces >= ranks:
        fitting.append("parallel.schedule=1f1b")
    most = " or ".join(fitting) or "parallel.pipeline=1"
    yield Problem(where, f"{text}: some stages would have nothing; use at most {most}, or more layers")


def _context_misfits(config: Config, layout: Layout, shape: TransformerConfig) -> Iterator[Problem]:
    """A context rank takes a piece from both ends of each sequence, and sequence parallelism cuts what it has."""
    context, tensor = layout.context, layout.tensor if config.parallel.sequence else 1
    if context == 1:
        return
    where, sequence = ("parallel", "context"), shape.sequence
    fitting = [
        n for n in divisors(sequence, near=context) if n == 1 or sequence % lcm(2 * n, n * tensor) == 0
    ]
    if sequence % (2 * context):
        text = f"twice `parallel.context: {context}` does not divide `model.sequence: {sequence}`: each rank takes a "
        text += "piece from both ends"
        yield Problem(where, f"{text}; use {alternatives(fitting)}, or another model.sequence")
    elif sequence // context % tensor:
        text = f"`parallel.context: {context}` leaves {sequence // context} of `model.sequence: {sequence}` to a rank, "
        text += f"which `parallel.sequence: true` does not divide over {tensor} tensor ranks"
        yield Problem(where, f"{text}; use {alternatives(fitting)}, or parallel.sequence=false")
    heads, rest = divmod(shape.heads, layout.tensor)
    if config.parallel.context_form == "all-to-all" and not rest and heads % context:
        text = f"`parallel.context_form: all-to-all` gives each of {context} context ranks some of the {heads} heads "
        text += "of a tensor rank (`model.heads` / `parallel.tensor`), which do not divide"
        sizes = [n for n in fitting if heads % n == 0]
        remedy = f"use parallel.context={alternatives(sizes)}, or parallel.context_form=ring"
        yield Problem(("parallel", "context_form"), f"{text}; {remedy}")


def _expert_misfits(config: Config, layout: Layout, shape: TransformerConfig) -> Iterator[Problem]:
    """Ranks that share the experts have equally many of them, and are data ranks of one copy of shards."""
    expert, where = layout.expert, ("parallel", "expert")
    copies = config.zero.replicas if config.zero.stage > 0 else 1
    if expert == 1 or layout.data % copies:
        return
    data = layout.data // copies
    follows = (
        config.parallel.data == "auto" and layout.data == expert
    )  # then there are as many as are asked for
    fitting = alternatives(
        [size for size in divisors(shape.experts, near=expert) if follows or data % size == 0]
    )
    if data % expert:
        text = f"`parallel.expert: {expert}` does not divide the {data} data ranks (`parallel.data`"
        text += f" / `zero.replicas: {copies}`)" if copies > 1 else ")"
        text += ", among which experts are spread"
        # More data ranks are no way out where the experts cannot be dealt to so many.
        more = "" if shape.experts % expert else f", or parallel.data={lcm(data, expert) * copies}"
        yield Problem(where, f"{text}; use {fitting}{more}")
    elif shape.experts % expert:
        text = f"`parallel.expert: {expert}` does not divide `model.experts: {shape.experts}`"
        yield Problem(where, f"{text}: every rank has equally many; use {fitting}, or another model.experts")


def check_fit(config: Config, layout: Layout, shape: TransformerConfig) -> None:
    """Refuses a layout that does not fit the model, or copies of shards that do not fit the layout.

    An uneven vocabulary, MLP width or number of layers is fine: some ranks hold more than others.

    Raises:
        ConfigError: with every misfit, the numbers and the choices that would fit.
    """
    problems = list(_misfits(config, layout, shape))
    if problems:
        raise ConfigError(problems)
