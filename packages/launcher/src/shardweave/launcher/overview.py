"""What a run will be, in a few lines: the dry run's answer and the header of a real one.

Everything is computed from the configuration (nothing is allocated, no rank is started), with the same functions
that the ranks use; the numbers of parameters and bytes are those of the model that would be built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

from shardweave.comm.text import bytes_text
from shardweave.launcher.assembly import DTYPES
from shardweave.launcher.communication import num_replicas, residual_bytes
from shardweave.launcher.config import Config
from shardweave.launcher.dataset import Dataset
from shardweave.launcher.gathering import check_gathering, gathered
from shardweave.launcher.layout import BatchPlan, Layout, batch_plan, check_fit, stages_of
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.shape import transformer_config
from shardweave.models import (
    MemoryUse,
    Part,
    RankLayout,
    TransformerConfig,
    count_parameters,
    flops,
    memory,
)
from shardweave.pipeline import schedule

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
    stages: list[Part]
    dataset: Dataset
    bubble: float
    """Share of a step that pipeline ranks stand idle, on paper."""
    memory: list[list[MemoryUse]]
    """By stage and tensor rank; parameters with what is gathered at a time."""
    gathered: list[int]
    """Bytes of parameters that a rank of each stage gathers at a time, at most; 0 below ZeRO stage 3."""

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
        stages = stages_of(layout, shape, chunked_loss=config.batch.chunked_loss)
        timeline = schedule(
            config.parallel.schedule, stages=layout.pipeline, micro_batches=plan.accumulation
        ).simulate()
        width = DTYPES[config.precision].itemsize
        live = [width * gathered(config, layout, shape, part).most for part in stages]
        uses = [
            [
                _held(config, layout, plan, shape, part, rank, extra, in_flight=peak)
                for rank in range(layout.tensor)
            ]
            for part, peak, extra in zip(stages, timeline.peaks_of_stages, live, strict=True)
        ]
        return cls(config, layout, shape, plan, stages, dataset, timeline.bubble_fraction, uses, live)

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
        yield (
            "data",
            f"{config.data.source}: {data.num_train:,} samples of {shape.sequence} tokens, {validation}",
        )
        most, live = self.largest
        yield "memory", f"about {bytes_text(most.total)} on the fullest rank ({_kinds(most, live)})"

    def details(self) -> Iterator[tuple[str, str]]:
        """What a dry run adds: who is where and holds what."""
        layout = self.layout
        for stage, part in enumerate(self.stages):
            yield f"stage {stage}", _part(part)
            for replica, context in islice(product(range(layout.data), range(layout.context)), _SHOWN):
                ranks = [
                    layout.rank(pp=stage, dp=replica, cp=context, tp=rank) for rank in range(layout.tensor)
                ]
                who = f"dp {replica}"
                who += f" ep {replica % layout.expert}" if layout.expert > 1 else ""
                who += f" cp {context}" if layout.context > 1 else ""
                shown = "  ".join(f"rank {rank} (tp {tp})" for tp, rank in enumerate(ranks[:_SHOWN]))
                yield "", f"{who}: {shown}"
            if layout.sharing > _SHOWN:
                yield "", f"... and so on to dp {layout.data - 1}"
            for rank, use in enumerate(self.memory[stage][:_SHOWN]):
                who = f"tp {rank}: " if layout.tensor > 1 else ""
                yield "", f"{who}{bytes_text(use.total)} ({_kinds(use, self.gathered[stage])})"
        work = flops(self.shape, batch=self.plan.global_batch)
        yield (
            "work",
            f"{work.model / 1e12:.4g} TFLOP a step, {work.model / layout.world_size / 1e12:.4g} a rank",
        )

    def _sharing(self) -> str:
        config, layout = self.config, self.layout
        scaling = " with loss scaling" if config.precision == "fp16" else ""
        parts = [f"ZeRO-{config.zero.stage}{self._copies()}", f"{config.precision}{scaling}"]
        if layout.tensor > 1:
            parts.append("sequence parallel" if config.parallel.sequence else "no sequence parallelism")
        if layout.pipeline > 1:
            parts.append(f"{config.parallel.schedule} with {100 * self.bubble:.1f} % bubble")
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


def _held(
    config: Config,
    layout: Layout,
    plan: BatchPlan,
    shape: TransformerConfig,
    part: Part,
    rank: int,
    live: int,
    *,
    in_flight: int,
) -> MemoryUse:
    """What a tensor rank of a stage holds while it trains, ``live`` bytes of gathered parameters among it."""
    use = memory(
        shape,
        layout=RankLayout(
            part=part,
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
        ),
        dtype=DTYPES[config.precision],
        gradients=DTYPES.get(config.zero.gradient_dtype),
        micro_batch=config.batch.micro,
        in_flight=in_flight,
    )
    elements = count_parameters(shape, part=part, tensor=layout.tensor, rank=rank, expert=layout.expert)
    # What compression keeps is a state of the optimizer's, saved with it.
    return replace(
        use,
        parameters=use.parameters + live,
        optimizer=use.optimizer + residual_bytes(config, layout, elements),
    )


def _keeps_gradients_whole(config: Config, plan: BatchPlan) -> bool:
    """Whether gradients stay whole until the step although the stage could shard them before: the runner of a schedule
    holds them over its micro-batches, and with compression they are sent once."""
    told = config.zero.shard_between_micro_batches is False
    return config.zero.stage >= 2 and (told or plan.accumulation > 1 or config.comm.compression != "none")


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
