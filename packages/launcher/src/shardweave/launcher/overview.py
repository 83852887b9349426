"""What a run will be, in a few lines: the dry run's answer and the header of a real one.

Everything is computed from the configuration (nothing is allocated, no rank is started), with the same functions
that the ranks use; the numbers of parameters and bytes are those of the model that would be built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from shardweave.comm.text import bytes_text
from shardweave.launcher.assembly import DTYPES
from shardweave.launcher.communication import num_replicas, residual_bytes
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.gathering import check_gathering, gathered
from shardweave.launcher.layout import BatchPlan, Layout, batch_plan, check_fit
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.shape import recomputed, step_flops, transformer_config
from shardweave.launcher.staging import Staging, staging_of
from shardweave.models import (
    MemoryUse,
    Part,
    RankLayout,
    TransformerConfig,
    count_parameters,
    memory,
)
from shardweave.models.huggingface.families import family_for

__all__ = ["Overview"]

_SHOWN = 16
"""Replicas and tensor ranks of a stage that the dry run lists."""


@dataclass(frozen=True)
class Overview:
    """Everything about a run that is known before it starts."""

    config: Config
    layout: Layout
    shape: TransformerConfig
    plan: BatchPlan
    staging: Staging
    dataset: Dataset
    bubble: float
    """Share of a step that pipeline ranks stand idle, on paper."""
    memory: list[list[MemoryUse]]
    """By pipeline rank and tensor rank; parameters with what is gathered at a time."""
    gathered: list[int]
    """Bytes of parameters that each pipeline rank gathers at a time, at most; 0 below ZeRO stage 3."""

    @classmethod
    def of(cls, config: Config, layout: Layout, dataset: Dataset) -> Overview:
        """Computes it.

        Raises:
            ConfigError: for a layout, a batch or a bound on what is gathered that does not fit.
        """
        shape = transformer_config(config)
        check_fit(config, layout, shape)
        check_gathering(config, layout, shape)
        plan = batch_plan(config, layout)
        staging = staging_of(config, layout, shape)
        timeline = staging.plan(plan.accumulation).simulate()
        width = DTYPES[config.precision].itemsize
        ranks = range(layout.pipeline)
        live = [width * gathered(config, layout, shape, staging.parts_of(rank)).most for rank in ranks]
        stages = [
            [
                _Stage(staging.parts[stage], in_flight)
                for stage, in_flight in sorted(timeline.alive(rank).items())
            ]
            for rank in ranks
        ]
        uses = [
            [
                _held(config, layout, plan, shape, stages[rank], tensor_rank, live[rank])
                for tensor_rank in range(layout.tensor)
            ]
            for rank in ranks
        ]
        return cls(config, layout, shape, plan, staging, dataset, timeline.bubble_fraction, uses, live)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return count_parameters(self.shape)

    @property
    def largest(self) -> tuple[MemoryUse, int]:
        """Of the rank that holds most, and what of it is gathered at a time."""
        both = zip(self.memory, self.gathered, strict=True)
        return max(((use, live) for uses, live in both for use in uses), key=lambda pair: pair[0].total)

    def header(self) -> Iterator[tuple[str, str]]:
        """The lines over a run: label and text."""
        config, shape, data = self.config, self.shape, self.dataset
        yield "run", f"{config.run.name} in {RunDirectory.of(config).path}, {config.run.steps} steps"
        yield "model", f"{self.parameters:,} parameters{_active(shape)}: {_shape(shape)}"
        yield "layout", f"{self.layout} = {_count(self.layout.world_size, 'rank')}, {self._sharing()}"
        yield "batch", f"{self.plan}; {self.plan.global_batch * shape.sequence:,} tokens a step"
        validation = (
            f"{data.num_validation:,} more for validation" if data.num_validation else "no validation"
        )
        yield "data", f"{_sources(data)}: {data.num_train:,} samples of {shape.sequence} tokens, {validation}"
        most, live = self.largest
        yield "memory", f"about {bytes_text(most.total)} on the fullest rank ({_kinds(most, live)})"

    def details(self) -> Iterator[tuple[str, str]]:
        """What a dry run adds: who is where and holds what."""
        layout = self.layout
        for place in range(layout.pipeline):
            for stage in self.staging.stages_of(place):
                yield f"stage {stage}", _part(self.staging.parts[stage])
            for replica, context in islice(product(range(layout.data), range(layout.context)), _SHOWN):
                ranks = [
                    layout.rank(pp=place, dp=replica, cp=context, tp=rank) for rank in range(layout.tensor)
                ]
                who = f"dp {replica}"
                who += f" ep {replica % layout.expert}" if layout.expert > 1 else ""
                who += f" cp {context}" if layout.context > 1 else ""
                shown = "  ".join(f"rank {rank} (tp {tp})" for tp, rank in enumerate(ranks[:_SHOWN]))
                yield "", f"{who}: {shown}"
            if layout.sharing > _SHOWN:
                yield "", f"... and so on to dp {layout.data - 1}"
            for rank, use in enumerate(self.memory[place][:_SHOWN]):
                who = f"tp {rank}: " if layout.tensor > 1 else ""
                yield "", f"{who}{bytes_text(use.total)} ({_kinds(use, self.gathered[place])})"
        work = step_flops(self.config, self.shape, self.plan.global_batch)
        again = work.hardware - work.model
        more = f", and {again / 1e12:.4g} a step again in backward" if again else ""
        yield (
            "work",
            f"{work.model / 1e12:.4g} TFLOP a step, {work.model / layout.world_size / 1e12:.4g} a rank{more}",
        )
        yield "export", _export(self.shape)

    def _sharing(self) -> str:
        config, layout = self.config, self.layout
        scaling = " with loss scaling" if config.precision == "fp16" else ""
        parts = [f"ZeRO-{config.zero.stage}{self._copies()}", f"{config.precision}{scaling}"]
        if layout.tensor > 1:
            parts.append("sequence parallel" if config.parallel.sequence else "no sequence parallelism")
        if layout.pipeline > 1:
            chunks = f", {self.staging.chunks} stages a rank," if self.staging.chunks > 1 else ""
            parts.append(f"{self.staging.schedule}{chunks} with {100 * self.bubble:.1f} % bubble")
        recompute = recomputed(config)
        if recompute.mode != "none":
            parts.append(f"recomputing {recompute}")
        if config.comm.compression != "none" and layout.sharing > 1:
            parts.append(
                f"gradients {config.comm.compression} after {_count(config.comm.warmup, 'plain step')}"
            )
        return ", ".join(parts)

    def _copies(self) -> str:
        copies = num_replicas(self.config)
        return (
            f" in {copies} copies of {_count(self.layout.sharing // copies, 'shard')}" if copies > 1 else ""
        )


@dataclass(frozen=True)
class _Stage:
    """One of the stages of a pipeline rank."""

    part: Part
    in_flight: int
    """Micro-batches whose activations it has when the rank has most in all."""


def _held(
    config: Config,
    layout: Layout,
    plan: BatchPlan,
    shape: TransformerConfig,
    stages: Sequence[_Stage],
    rank: int,
    live: int,
) -> MemoryUse:
    """What a tensor rank with some stages holds while it trains, ``live`` bytes of gathered parameters among it."""
    held: list[MemoryUse] = []
    elements = 0
    for number, stage in enumerate(stages):
        # Where both ends of the model are here, they share a tied embedding.
        shared = number > 0 and stage.part.head and stages[0].part.embedding and shape.tie_embeddings
        where = RankLayout(
            part=stage.part,
            shared_embedding=shared,
            tensor=layout.tensor,
            tensor_rank=rank,
            sequence_parallel=config.parallel.sequence and layout.tensor > 1,
            keep_inputs=config.parallel.keep_inputs and config.parallel.sequence,
            chunked_loss=config.batch.chunked_loss,
            context=layout.context,
            context_form=config.parallel.context_form,
            expert=layout.expert,
            data=layout.sharing // num_replicas(config),
            zero_stage=config.zero.stage,
            whole_gradients=_keeps_gradients_whole(config, plan),
        )
        held.append(
            memory(
                shape,
                layout=where,
                dtype=DTYPES[config.precision],
                gradients=DTYPES.get(config.zero.gradient_dtype),
                micro_batch=config.batch.micro,
                in_flight=stage.in_flight,
                recompute=recomputed(config),
            )
        )
        elements += where.elements(shape)
    # What compression keeps is a state of the optimizer's, saved with it.
    return MemoryUse(
        parameters=sum(use.parameters for use in held) + live,
        gradients=sum(use.gradients for use in held),
        optimizer=sum(use.optimizer for use in held) + residual_bytes(config, layout, elements),
        activations=sum(use.activations for use in held),
    )


def _keeps_gradients_whole(config: Config, plan: BatchPlan) -> bool:
    """Whether gradients stay whole until the step although the stage could shard them before: the runner of a schedule
    holds them over its micro-batches, and with compression they are sent once."""
    told = config.zero.shard_between_micro_batches is False
    return config.zero.stage >= 2 and (told or plan.accumulation > 1 or config.comm.compression != "none")


def _sources(data: Dataset) -> str:
    """Their names; of several with the share of the samples, and of which there will be none."""
    if len(data.sources) == 1:
        return data.sources[0].corpus.name
    total = sum(source.weight for source in data.sources)
    texts = []
    for source in data.sources:
        unopened = "" if source.corpus.is_open else " (no sample in this run)"
        texts.append(f"{source.corpus.name} {float(source.weight / total):.3g}{unopened}")
    return " + ".join(texts)


def _shape(shape: TransformerConfig) -> str:
    heads = (
        f"{shape.heads} heads"
        if shape.num_kv_heads == shape.heads
        else f"{shape.heads}/{shape.num_kv_heads} heads"
    )
    return (
        f"{_count(shape.layers, 'layer')}, hidden {shape.hidden}, {heads}, {_mlp(shape)}, "
        f"vocabulary {shape.vocab}, sequence {shape.sequence}"
    )


def _mlp(shape: TransformerConfig) -> str:
    if not shape.experts:
        return f"ffn {shape.ffn_size}"
    capacity = shape.expert_capacity
    room = "" if capacity is None else f" at capacity {capacity:g}"
    return (
        f"{_count(shape.experts, 'expert')} of ffn {shape.ffn_size}, {shape.experts_per_token} a token{room}"
    )


def _active(shape: TransformerConfig) -> str:
    return f", {count_parameters(shape, active=True):,} of them for a token" if shape.experts else ""


def _export(shape: TransformerConfig) -> str:
    """Whether published files can hold the model, which is better known before it is trained."""
    try:
        return f"as {family_for(shape, None).architecture}"
    except ValueError as error:
        return f"not possible: {error}"


def _part(part: Part) -> str:
    blocks = list(part.layers)
    held = ["embedding"] if part.embedding else []
    if blocks:
        held.append(f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}")
    return ", ".join([*held, "head"] if part.head else held)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _kinds(use: MemoryUse, live: int) -> str:
    kinds = ("gradients", "optimizer", "activations")
    gathered = f" with {bytes_text(live)} gathered at a time" if live else ""
    texts = [f"{kind} {bytes_text(getattr(use, kind))}" for kind in kinds]
    return ", ".join([f"parameters {bytes_text(use.parameters)}{gathered}", *texts])
