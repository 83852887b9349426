"""From a configuration to what trains: the one place where the packages meet.

The order matters, and each line depends on the ones before it::

    [1] parts       which blocks this rank's pipeline stages hold     staging, models
    [2] modules     the parts, their layers split over the tensor     models, tensor_parallel
                    axis, sequences over the context axis,
                    and experts over a part of the data axis
    [3] ties        the head's copy of the embedding                  pipeline: needs the modules
    [4] pipeline    runs the schedule over the stages                 pipeline: records that ranks differ
    [5] optimizer   flat buffers, shards over the data axis           zero: reads the finished records

A single process goes the same way: its axes have one rank, and every collective on them is the identity.

Values come with the modules in [2], or at ZeRO stage 3, whose modules are built without memory, in [5]: a few at a
time, each sharded before the next. So a model that no rank could hold is created, or read from files, in shards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardweave.comm import Mesh, measure_links
from shardweave.comm.devices import accelerator
from shardweave.launcher.communication import compression_of, num_replicas
from shardweave.launcher.config import Config
from shardweave.launcher.config import Optimizer as OptimizerSettings
from shardweave.launcher.config import Zero as ZeroSettings
from shardweave.launcher.gathering import check_gathering, gathering_options
from shardweave.launcher.layout import BatchPlan, Layout, batch_plan, check_fit
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.shape import recomputed, transformer_config
from shardweave.launcher.staging import Staging, staging_of
from shardweave.launcher.unbuilt import unbuilt
from shardweave.models import (
    Drawn,
    FromHuggingFace,
    HuggingFaceError,
    Part,
    Source,
    Transformer,
    TransformerConfig,
    fill,
)
from shardweave.pipeline import Pipeline, tie
from shardweave.tensor_parallel import Overlap, overlap_for
from shardweave.zero import LossScale, MixedPrecision, ZeroOptimizer, decay_groups

__all__ = [
    "DTYPES",
    "Assembly",
    "assemble",
    "device_of",
    "layout_of_mesh",
    "modules_with",
    "source_of",
    "stages_with",
]

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, eq=False)
class Assembly:
    """What one rank trains with."""

    shape: TransformerConfig
    layout: Layout
    plan: BatchPlan
    modules: tuple[Transformer, ...]
    """One per stage of this rank, in the order of the stages."""
    pipeline: Pipeline
    optimizer: ZeroOptimizer
    device: torch.device

    def parameters(self) -> list[nn.Parameter]:
        """This rank's, each once: embedding and head may be stages of one rank and share one."""
        return _parameters(self.modules)

    def buffers(self) -> dict[str, torch.Tensor]:
        """This rank's, by canonical name."""
        return {name: buffer for module in self.modules for name, buffer in module.named_buffers()}

    def train(self, mode: bool = True) -> None:
        """Puts all modules into training mode, or out of it."""
        for module in self.modules:
            module.train(mode)


def layout_of_mesh(mesh: Mesh) -> Layout:
    """The sizes of a mesh's axes."""
    return Layout(
        data=mesh.dp.size,
        tensor=mesh.tp.size,
        pipeline=mesh.pp.size,
        context=mesh.cp.size,
        expert=mesh.ep.size,
    )


def device_of(config: Config) -> torch.device:
    """The device that this rank computes on.

    Raises:
        ValueError: for an accelerator that this machine does not have.
    """
    found = accelerator()
    if config.run.device == "cpu" or (config.run.device == "auto" and found is None):
        return torch.device("cpu")
    if found is None or config.run.device not in ("auto", found.type):
        raise ValueError(
            f"`run.device: {config.run.device}` is not on this machine (accelerator: "
            f"{'none' if found is None else found.type}); use run.device=auto"
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


def assemble(config: Config, mesh: Mesh) -> Assembly:
    """Builds this rank's part of the run. Every rank of the mesh calls it at the same point.

    Raises:
        ConfigError: for a layout or batch that does not fit, or a setting that is not built yet; the same on every
            rank, before any message.
    """
    shape = transformer_config(config)
    source = source_of(config, shape)
    stages = _stages(config, mesh, shape, None if config.zero.stage == 3 else source)
    modules, device, dtype = stages.modules, stages.device, DTYPES[config.precision]

    if config.compile:
        for module in modules:
            module.compile_blocks()

    # [5] Every record is complete now. The loss is divided by the global number of tokens, so gradients of data
    #     ranks are summed, not averaged. Small ones vanish in fp16, so there the loss is multiplied before. Stage 3
    #     gathers parameters when the parts of the module run, and fills and shards them one part after the other here.
    optimizer = ZeroOptimizer(
        decay_groups(_parameters(modules), config.optimizer.weight_decay),
        _OPTIMIZERS[config.optimizer.name],
        data=mesh.data,
        shard=mesh.shard,
        model=mesh.model,
        module=modules,
        stage=config.zero.stage,
        initialize=functools.partial(fill, source=source) if config.zero.stage == 3 else None,
        clip=config.optimizer.clip,
        precision=_precision(config, dtype),
        bucket_mb=config.comm.bucket_mb,
        shard_between_micro_batches=_between_micro_batches(config.zero),
        nonfinite="skip",  # the trainer sees to the rest, which looks where it came from
        reduction="sum",
        loss_scale=LossScale() if dtype == torch.float16 else None,
        compression=compression_of(config.comm),
        **gathering_options(config.zero),
        **_options(config.optimizer),
    )
    return Assembly(shape, stages.layout, stages.plan, modules, stages.pipeline, optimizer, device)


def modules_with(config: Config, mesh: Mesh, source: Source) -> tuple[Transformer, ...]:
    """This rank's stages with the values of `source` and finished records, and nothing to train them with.

    Every rank of the mesh calls it at the same point.

    Raises:
        ConfigError: as `assemble` does.
    """
    return stages_with(config, mesh, source)[0]


def stages_with(config: Config, mesh: Mesh, source: Source) -> tuple[tuple[Transformer, ...], Pipeline]:
    """As `modules_with`, and the pipeline that runs them."""
    stages = _stages(config, mesh, transformer_config(config), source)
    return stages.modules, stages.pipeline


@dataclass(frozen=True, eq=False)
class _Stages:
    """This rank's, before there is an optimizer."""

    layout: Layout
    plan: BatchPlan
    device: torch.device
    modules: tuple[Transformer, ...]
    pipeline: Pipeline


def _stages(config: Config, mesh: Mesh, shape: TransformerConfig, source: Source | None) -> _Stages:
    """`source`: of the parameters' values; None: they stay without memory."""
    problems = [*unbuilt(config), *_other_replicas(config, mesh)]
    if problems:
        raise ConfigError(problems)
    layout, device = layout_of_mesh(mesh), device_of(config)
    check_fit(config, layout, shape)
    check_gathering(config, layout, shape)
    plan = batch_plan(config, layout)

    # [1] The blocks between two cuts of (embedding, block 0, ..., head), for each stage of this rank.
    staging = staging_of(config, layout, shape)
    parts = staging.parts_of(mesh.pp.rank)

    # [2] Weights come from (seed, canonical name), or from files, in fp32 or wider, each rank its slices; masters are
    #     taken from these, before the optimizer rounds the parameters to a narrower type.
    decomposed = _decomposed(config, mesh, device, DTYPES[config.precision])
    modules = tuple(_module(config, mesh, shape, part, decomposed) for part in parts)
    if source is not None:
        for module in modules:
            module.to_empty(device=device).apply(functools.partial(fill, source=source))

    # [3] The first and the last stage each hold the shared embedding.
    _tie(modules, mesh, staging)

    # [4] As many stages per rank as the schedule has, also when there is one rank: it then runs its micro-batches
    #     without a message. The loss is computed where the head is, by the last module of its rank.
    pipeline = Pipeline(
        modules, mesh.pp, staging.plan(plan.accumulation), loss=modules[-1].loss, device=device
    )
    return _Stages(layout, plan, device, modules, pipeline)


def source_of(config: Config, shape: TransformerConfig) -> Source:
    """Where parameters have their values from at the start; nothing but headers is read here.

    Raises:
        ConfigError: for `model.weights` that are not of this model.
    """
    if config.model.weights is None:
        return Drawn(shape, config.run.seed)
    try:
        return FromHuggingFace(Path(config.model.weights).expanduser(), shape)
    except HuggingFaceError as error:
        way_out = f"`shardweave import {config.model.weights} --out RUN`, which writes them"
        text = str(error).replace("build the model from the directory", way_out)
        raise ConfigError([Problem(("model", "weights"), f"model.weights: {text}")]) from None


def _module(
    config: Config, mesh: Mesh, shape: TransformerConfig, part: Part, decomposed: bool | Overlap
) -> Transformer:
    """One stage, without memory."""
    return Transformer(
        shape,
        tensor=mesh.tp,
        sequence_parallel=config.parallel.sequence,
        keep_inputs=config.parallel.keep_inputs,
        decomposed=decomposed,
        chunked_loss=config.batch.chunked_loss,
        recompute=recomputed(config),
        context=mesh.cp,
        context_form=config.parallel.context_form,
        expert=mesh.ep,
        expert_data=mesh.expert_data,
        part=part,
        device="meta",
        dtype=torch.promote_types(DTYPES[config.precision], torch.float32),
    )


def _parameters(modules: Sequence[Transformer]) -> list[nn.Parameter]:
    """Those of all stages, in their order, each once."""
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def _tie(modules: Sequence[Transformer], mesh: Mesh, staging: Staging) -> None:
    """Makes the copies of a tied embedding one parameter: on one rank one object, with the sum of both gradients; on
    two ranks each has a summand, which the record says."""
    copies = [module for module in modules if module.tied_parameters()]
    if len(copies) == 2:
        copies[1].share_embedding(copies[0])
        return
    for module in copies:
        for _, parameter in module.tied_parameters():
            tie(parameter, mesh.pp, (0, len(staging.parts) - 1), rank_of_stage=staging.rank_of_stage)


def _other_replicas(config: Config, mesh: Mesh) -> Iterator[Problem]:
    """A mesh without the copies of shards that the configuration wants, or with others."""
    wanted, found = num_replicas(config), mesh.replica.size
    if wanted != found:
        yield Problem(
            ("zero", "replicas"),
            f"`zero.replicas: {config.zero.replicas}`, but the mesh has {found}; build it with "
            f"Mesh(..., replicas={wanted}), or use zero.replicas={found}",
        )


def _decomposed(config: Config, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> bool | Overlap:
    """Whether products are computed in pieces, or what decides it for each; collective over all ranks.

    Links are measured at the start over several nodes only, and the tensor axis is on one of them, as a rule.
    """
    wanted = config.parallel.decomposed
    if isinstance(wanted, bool):
        return wanted
    if not config.parallel.sequence or mesh.tp.size == 1 or device.type == "cpu":
        return False
    links = mesh.topology.links
    if mesh.tp.link not in links.measured:
        links = measure_links(mesh.topology, mesh.world).links
    return overlap_for(mesh.tp, links, device=device, dtype=dtype)


def _options(settings: OptimizerSettings) -> dict[str, Any]:
    adam = {} if settings.name == "sgd" else {"betas": settings.betas, "eps": settings.eps}
    return {"lr": settings.lr, **adam}


def _between_micro_batches(settings: ZeroSettings) -> bool | None:
    """Below stage 2 it has no effect, which a warning says; the optimizer would refuse it."""
    value = settings.shard_between_micro_batches
    return value if isinstance(value, bool) and settings.stage >= 2 else None


def _precision(config: Config, parameters: torch.dtype) -> MixedPrecision:
    def named(name: str) -> torch.dtype | None:
        return None if name == "auto" else DTYPES[name]

    return MixedPrecision(
        parameters=parameters,
        gradients=named(config.zero.gradient_dtype),
        reduction=named(config.zero.reduce_dtype),
    )
