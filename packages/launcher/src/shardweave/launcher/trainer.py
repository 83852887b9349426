"""Training steps and evaluation on an existing process group.

A `Trainer` has no global state and starts nothing: it is built on a mesh, and two of them on two meshes can live in
one process, which is how the tests compare layouts. What surrounds it in a real run (metrics, checkpoints, guards)
is `loop`; how it is put together is `assembly`.

One step::

    [1] micro-batches of this replica                     a function of (seed, step)
    [2] valid tokens, summed over the data axis           the one divisor of the whole global batch
    [3] forwards and backwards over the stages            gradients of (sum of losses) / (global tokens), with fp16
                                                          times the loss scale
    [4] reduce, global norm, clip, update                 zero, which takes the scale out again
    [5] loss, summed over data ranks and stages           what every rank reports
    [6] what the routers did, summed over all ranks       with experts; moves the biases that balance them, if any
    [7] a second look, if a number is not finite          where it came from: `anomalies`
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.comm import DropoutStreams, Mesh, all_reduce, counts_here, full_index, sharding_of
from shardweave.launcher.anomalies import find_origin, origin_text
from shardweave.launcher.assembly import Assembly, assemble
from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data.batches import Batches, BatchSource, Transform
from shardweave.launcher.data.blend import BlendOrder
from shardweave.launcher.data.dataset import IGNORED, Dataset, MicroBatch
from shardweave.launcher.data.loader import Loader
from shardweave.launcher.data.position import Given, Position, continued, past
from shardweave.launcher.data.validation import validation_sources
from shardweave.launcher.evaluation import Evaluation, evaluate
from shardweave.launcher.learning_rate import learning_rate
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.statistics import StepStatistics, is_due, step_statistics, watching
from shardweave.launcher.words import tokenizer_of
from shardweave.models import MicroBatchRouters, RouterStatistics, StepRouters, parameter_shapes

__all__ = ["Record", "StepResult", "Trainer", "recorded", "train_in_process"]


@dataclass(frozen=True)
class StepResult:
    """One step, as every rank of every layout reports it."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean over the valid tokens of the global batch; 0 when it has none."""
    grad_norm: float
    """Global L2 norm before clipping, each element of the model counted once."""
    lr: float
    tokens: int
    """Valid tokens of the global batch."""
    skipped: bool
    """Whether the update was left out because a gradient was not finite; the same on all ranks."""
    loss_scale: float | None = None
    """With fp16: what the loss was multiplied by for the backward passes of this step; `loss` is not."""
    backed_off: bool = False
    """Whether the step was skipped because that was too much; the next one has less."""
    routers: RouterStatistics | None = None
    """With experts: what the routers did. `loss` is without what they add to it (`RouterStatistics.loss`)."""
    head_z_loss: float | None = None
    """With `model.head_z_loss`: the mean of `logsumexp(logits)^2` over the valid tokens, without its weight; `loss` is
    without it."""
    anomaly: str = ""
    """Where a loss or gradient that is not finite came from, as a clause; empty where all are finite, and where only a
    loss scale was too large."""
    statistics: StepStatistics | None = None
    """What gradients and activations looked like, in a step of which `metrics.statistics` asks it."""


class Trainer:
    """One rank's part of a training run.

    Every rank of the mesh builds it at the same point and calls the same methods in the same order.

    Args:
        config: the run. Its layout is the mesh's; `config.parallel` supplies only what the mesh does not say.
        mesh: axes over the initialised world (or one process without ``torch.distributed``).
        dataset: the samples; None: read from `config.data`.
        batches: where training micro-batches come from; None: the sample order over `dataset`.
        transform: changes each sample's tokens before it is trained on, with random numbers of its own
            (:class:`~shardweave.launcher.data.Batches`); without an effect on `batches`.

    Raises:
        ConfigError: for a layout, batch or corpus that does not fit; on every rank alike.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        dataset: Dataset | None = None,
        batches: BatchSource | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.config, self.mesh, self._transform = config, mesh, transform
        self.parts: Assembly = assemble(config, mesh)
        if dataset is None and batches is None:
            dataset = open_dataset(config, self.parts.shape.sequence)
        self.dataset = dataset
        self._order: BlendOrder | None = None
        self._gone: tuple[Given, ...] = ()
        if batches is not None:
            self.batches = batches
        elif dataset is not None:
            self._follow(dataset, BlendOrder(dataset.sources, config.run.seed))
        self.step = 0
        """Optimizer steps done."""
        self.samples = 0
        """Samples trained on, over all ranks: the position in the sample order."""
        self.began_at = 0
        """Number of the last step's first sample in the sample order."""
        self.skipped: tuple[tuple[int, int], ...] = ()
        """Ranges of the sample order that are not trained on: the first, and the one behind the last. Any step that
        would have one of them begins behind the range instead. Checkpoints keep them."""
        self.guard_state: Mapping[str, object] = {}
        """What the run's guards remember, as JSON: checkpoints keep it."""
        self.data_seconds = 0.0
        """How long the last step waited for its micro-batches, on this rank."""
        self.trained_on: tuple[tuple[int, ...], ...] = ()
        """The ids of the last step's samples on this rank, by micro-batch."""

    batches: BatchSource
    """Where the training micro-batches come from."""

    def _follow(self, dataset: Dataset, order: BlendOrder) -> None:
        """Takes the micro-batches from an order over the samples of a dataset."""
        config, plan, device = self.config, self.parts.plan, self.parts.device
        self.dataset, self._order = replace(dataset, sources=order.sources), order
        batches = Batches(
            dataset=self.dataset,
            order=order,
            global_batch=plan.global_batch,
            micro=plan.micro,
            replicas=plan.data,
            replica=self.mesh.dp.rank,
            transform=self._transform,
            seed=config.run.seed,
        )
        pin = device if device.type == "cuda" else None
        self.batches = Loader(batches, plan.global_batch, workers=config.data.workers, pin=pin)

    def close(self) -> None:
        """Ends the threads that make micro-batches; a next step starts others. Otherwise they end with the trainer."""
        if isinstance(self.batches, Loader):
            self.batches.close()

    @property
    def position(self) -> Position | None:
        """Where this run is in its data; None with batches of the caller's."""
        return None if self._order is None else Position.of(self._order, self.samples, self._gone)

    def continue_from(self, step: int, samples: int, position: Position | None = None) -> tuple[str, ...]:
        """Moves the step and the position in the data; parameters and optimizer state are restored elsewhere.

        `position`: where the run was, if that is known; its sources may be others now. Returns what is different then.
        """
        self.step, self.samples = step, samples
        if position is None or self.dataset is None or self._order is None:
            return ()
        found = continued(position, samples, self.dataset.sources, self.config.run.seed)
        self._gone = found.gone
        self.close()
        self._follow(self.dataset, found.order)
        return found.changes

    def train_step(self) -> StepResult:
        """One optimizer step over a global batch; the same result on every rank.

        Raises:
            FloatingPointError: on every rank, with `guard.nonfinite: stop`, for a loss or gradient that is not finite;
                it says where it came from.
        """
        parts, settings = self.parts, self.config.optimizer
        self.samples = self.began_at = past(self.samples, parts.plan.global_batch, self.skipped)
        began = time.perf_counter()
        made = self.batches.at(self.samples)  # [1]
        self.data_seconds = time.perf_counter() - began
        self.trained_on = tuple(tuple(batch.samples.tolist()) for batch in made)
        micro_batches = [batch.to(parts.device) for batch in made]
        tokens = self._sum(sum(_valid(batch) for batch in micro_batches))  # [2]
        rate = learning_rate(self.step, self.config.run.steps, settings)
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        loss_scale = parts.optimizer.loss_scale  # 1 without
        routers = self._routers(loss_scale)
        with watching(parts, wanted=is_due(self.step + 1, self.config.metrics.statistics)) as watched:
            total = parts.pipeline.step(  # [3]
                [batch.inputs for batch in micro_batches],
                [batch.targets for batch in micro_batches],
                scale=loss_scale / max(tokens, 1),
                arguments=self._arguments(micro_batches, routers),
            )
        statistics = step_statistics(parts, watched, self.mesh.world)
        parts.optimizer.step()  # [4]
        parts.optimizer.zero_grad()
        loss = self._loss(total) / max(tokens, 1)  # [5]
        head_z_loss = self._head_z_loss(tokens)
        anomaly = self._anomaly(loss, micro_batches)  # [7]
        self.step += 1
        self.samples += parts.plan.global_batch
        seen = None if routers is None else routers.statistics(self.mesh.world, device=parts.device)  # [6]
        if seen is not None and self.config.model.router_bias and not parts.optimizer.step_skipped:
            for module in parts.modules:
                module.move_router_biases(seen, self.config.model.router_bias)
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=float(parts.optimizer.grad_norm),
            lr=rate,
            tokens=tokens,
            skipped=parts.optimizer.step_skipped,
            loss_scale=loss_scale if self.config.precision == "fp16" else None,
            backed_off=parts.optimizer.step_backed_off,
            routers=seen,
            head_z_loss=head_z_loss,
            anomaly=anomaly,
            statistics=statistics,
        )

    def _anomaly(self, loss: float, micro_batches: Sequence[MicroBatch]) -> str:
        """Where a number of this step came from that is not finite, looked for only if there is one."""
        optimizer = self.parts.optimizer
        unscaled = optimizer.step_skipped and not optimizer.step_backed_off
        if math.isfinite(loss) and not unscaled:
            return ""
        arguments = self._arguments(micro_batches, self._routers(1.0))
        origin = find_origin(self.parts, self.mesh, micro_batches, arguments)
        for module in self.parts.modules if self.parts.shape.head_z_loss else ():
            module.take_head_z_loss()  # of the second look
        text = origin_text(origin, optimizer.nonfinite_gradient)
        if self.config.guard.nonfinite == "stop":
            changed = (
                "no parameter was changed"
                if optimizer.step_skipped
                else "gradients were finite and were used"
            )
            raise FloatingPointError(f"step {self.step + 1}: the loss is {loss}: {text}; {changed}")
        return text

    def evaluate(self) -> Evaluation | None:
        """Mean loss per token over `run.eval_samples` validation samples, always the same ones; None without any.

        Training is not affected: no gradient, no dropout, no random number. Every rank calls it, as :meth:`train_step`:
        each evaluates its part of the samples and of the model.
        """
        if self.dataset is None:
            return None
        most = self.config.run.eval_samples
        sources = validation_sources(self.dataset)
        return evaluate(self.parts, self.mesh, sources, None if most == "all" else most, self._token_bytes)

    @cached_property
    def _token_bytes(self) -> NDArray[np.int32]:
        """Of every token, or of none where the tokenizer's files are gone: tokens in files are trained on without."""
        try:
            return tokenizer_of(self.config).token_bytes
        except ConfigError:
            return np.empty(0, np.int32)

    def parameter_count(self) -> int:
        """Parameters of the whole model, whatever this rank holds of it."""
        held = sum(parameter.numel() for parameter, is_counted in self._of_the_model() if is_counted)
        return int(self._over_the_model(torch.tensor(held, device=self.parts.device)))

    def parameter_norm(self) -> float:
        """L2 norm of the whole model's parameters as they are now, each element counted once."""
        total = torch.zeros((), dtype=torch.float64, device=self.parts.device)
        for parameter, is_counted in self._of_the_model():
            square = parameter.detach().double().square().sum()  # by all, as it is gathered by all
            total += square if is_counted else 0.0
        return math.sqrt(float(self._over_the_model(total)))

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the whole model under its canonical name, in its full shape, on every rank.

        For tests and small models: it moves all parameters. Values are exact: each element is added to zeros.
        """
        shapes = parameter_shapes(self.parts.shape)
        # One collective for all of them: a model has hundreds of parameters, and each would cost a round trip.
        dtype = self.parts.parameters()[0].dtype
        sizes = [math.prod(entry.shape) for entry in shapes]
        values = torch.zeros(sum(sizes), dtype=dtype, device=self.parts.device)
        full = {
            entry.name: part.view(entry.shape)
            for entry, part in zip(shapes, values.split(sizes), strict=True)
        }
        for parameter, is_counted in self._of_the_model():
            here = parameter.detach().clone()  # by all, as it is gathered by all
            if is_counted:
                full[sharding_of(parameter).name][full_index(parameter)] = here
        self._over_the_model(values)
        return {
            name: part.clone() for name, part in full.items()
        }  # each with storage of its own, to be sent or kept

    def _of_the_model(self) -> Iterator[tuple[Tensor, bool]]:
        """The parameters that this place in the model counts, and whether this rank does it for all ranks of ``ep``.

        At ZeRO stage 3 what is read is gathered by all data ranks, so they have to read the same ones, whoever counts.
        """
        for parameter in self.parts.parameters():
            if counts_here(parameter, self.mesh.model):
                yield parameter, counts_here(parameter, self.mesh.ep)

    def _over_the_model(self, values: Tensor) -> Tensor:
        """`values`, in place, summed over all that hold a part of one copy of the model, experts among them."""
        return all_reduce(all_reduce(values, self.mesh.model), self.mesh.ep)

    def _routers(self, loss_scale: float) -> StepRouters | None:
        """With experts: what their losses are multiplied by, and who notes what they do, in one step."""
        shape, total = self.parts.shape, self.parts.plan.global_batch
        if not shape.experts:
            return None
        return StepRouters(shape, sequences=total, tokens=total * shape.sequence, scale=loss_scale)

    def _arguments(
        self, micro_batches: Sequence[MicroBatch], routers: StepRouters | None
    ) -> list[dict[str, DropoutStreams | MicroBatchRouters | Tensor | None]]:
        """Dropout masks are keyed by the samples they fall on: the same in every layout."""
        return [
            {
                "streams": DropoutStreams(self.config.run.seed, self.step, batch.samples),
                "documents": batch.documents,
                "routers": None if routers is None else routers.micro_batch(),
            }
            for batch in micro_batches
        ]

    def _head_z_loss(self, tokens: int) -> float | None:
        if not self.parts.shape.head_z_loss:
            return None
        own = torch.zeros((), dtype=torch.float64, device=self.parts.device)
        for module in self.parts.modules:
            own += module.take_head_z_loss()
        return self._loss(own) / max(tokens, 1)

    def _sum(self, count: int) -> int:
        """A count summed over the replicas; the ranks of one, context ranks among them, have the same."""
        total = torch.tensor(count, dtype=torch.int64, device=self.parts.device)
        return int(all_reduce(total, self.mesh.dp))

    def _loss(self, total: Tensor | None) -> float:
        """The last stage's sum, added up over replicas and their context ranks, on every rank; stages without a loss
        contribute nothing."""
        value = torch.zeros((), dtype=torch.float64, device=self.parts.device)
        if total is not None:
            value += total.to(torch.float64)
        return float(all_reduce(all_reduce(value, self.mesh.data), self.mesh.pp))


@dataclass(frozen=True)
class Record:
    """What `recorded` saw, the same on every rank."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """After the last step: full tensors by canonical name."""
    statistics: list[StepStatistics] = field(default_factory=list)
    """Of the steps that `metrics.statistics` asks for."""


def train_in_process(config: Config, mesh: Mesh, steps: int, *, dataset: Dataset | None = None) -> Record:
    """Trains `steps` steps on a mesh and returns what every layout must agree on.

    Called by every rank of the mesh; writes no files. Learning rates span `config.run.steps`.
    """
    return recorded(Trainer(config, mesh, dataset=dataset), steps)


def recorded(trainer: Trainer, steps: int) -> Record:
    """Trains `steps` steps with a trainer; called by every rank of its mesh."""
    results = [trainer.train_step() for _ in range(steps)]
    return Record(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        parameters=trainer.full_parameters(),
        statistics=[result.statistics for result in results if result.statistics is not None],
    )


def _valid(batch: MicroBatch) -> int:
    return int((batch.targets != IGNORED).sum())
