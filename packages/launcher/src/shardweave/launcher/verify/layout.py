"""Verifies one layout on a mesh: one process' steps, the layout's steps, every rank's comparison, one report.

The one process is the world's first rank, before the layout is built: alone on a mesh of its own, with nothing of the
layout's axes. So no further process has to be started, and what it computed reaches the other ranks through the
collectives that they have anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardweave.comm import Mesh, full_index, sharding_of
from shardweave.launcher.assembly import device_of
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.verify.capture import Capture, StepCapture, share
from shardweave.launcher.verify.comparison import Comparison
from shardweave.launcher.verify.explanation import norm_remark
from shardweave.launcher.verify.report import Report, explained, gather_report
from shardweave.launcher.verify.tolerances import tolerance_of
from shardweave.launcher.verify.watching import Seen, Watcher, local_parameters

__all__ = ["DEFAULT_STEPS", "capture_reference", "verify_layout", "verify_rank"]

DEFAULT_STEPS = 3
"""Enough for what a step leaves behind (updated copies, moments, the clipped norm) to be used twice."""


def verify_layout(
    config: Config, mesh: Mesh, steps: int = DEFAULT_STEPS, *, dataset: Dataset | None = None
) -> Report:
    """Compares the layout of `mesh` with one process over the first `steps` steps of the run; collective.

    `config` is taken as it is: see `shrinking` for a smaller one, and for float64. `dataset`: the samples; None: read
    from `config.data`.
    """
    capture = capture_reference(config, steps, dataset=dataset) if mesh.world.is_first else None
    capture = share(capture, config, mesh, device_of(config), steps)
    return verify_rank(config, mesh, capture, dataset=dataset)


@torch.no_grad()
def capture_reference(config: Config, steps: int, *, dataset: Dataset | None = None) -> Capture:
    """What one process computes in the first `steps` steps; the process may be a rank of any world."""
    alone = config.zero.model_copy(update={"replicas": 1})  # which one process has no ranks for
    at_once = config.batch.model_copy(update={"chunked_loss": False})  # the loss in the plain way
    plain = {"recompute": "none", "compile": False}  # the layout's share of what may be wrong
    config = config.model_copy(update={"zero": alone, "batch": at_once, **plain})
    with torch.enable_grad():
        trainer = Trainer(config, Mesh.single(), dataset=dataset)
    watcher = Watcher(trainer)
    device = trainer.parts.device
    capture = Capture.empty(config, device)
    _put_parameters(trainer, capture.start)
    for _ in range(steps):
        step = StepCapture.empty(config, device)
        with torch.enable_grad():
            result = trainer.train_step()
        _put(watcher.take(), step)
        _put_parameters(trainer, step.parameters)
        step.numbers.copy_(torch.tensor([result.loss, result.grad_norm, result.lr], dtype=torch.float64))
        capture.steps.append(step)
    watcher.close()
    return capture


@torch.no_grad()
def verify_rank(config: Config, mesh: Mesh, capture: Capture, *, dataset: Dataset | None = None) -> Report:
    """Trains the layout of `mesh` for as many steps as `capture` has and compares; collective, the same report for all.

    Every rank compares what it holds with its part of the capture, so where they part is a matter of who says so.
    """
    with torch.enable_grad():
        trainer = Trainer(config, mesh, dataset=dataset)
    watcher = Watcher(trainer)
    comparison = Comparison(config, capture, mesh.world.rank)
    comparison.start(local_parameters(trainer.parts))
    norms: dict[int, str] = {}
    for number, right in enumerate(capture.steps, start=1):
        with torch.enable_grad():
            result = trainer.train_step()
        comparison.step(result, watcher.take(), local_parameters(trainer.parts))
        tolerance = tolerance_of("norm", config.precision, number)
        norms[number] = norm_remark(result.grad_norm, right.norm, right.gradients, tolerance)
    watcher.close()
    return explained(gather_report(config, mesh, comparison.differences, len(capture.steps)), norms)


def _put(seen: Seen, step: StepCapture) -> None:
    """Hidden states by sample, gradients by parameter; one process sees them whole."""
    forward = [part for part in seen.hidden if part.place == "embedding" and part.kind == "hidden"]
    step.samples.copy_(torch.cat([part.samples for part in forward]))
    for part in seen.hidden:
        target = step.hidden if part.kind == "hidden" else step.flow
        target[part.place][step.rows(part.samples)] = part.values.transpose(0, 1)
    for piece in seen.gradients:
        full = step.gradients[sharding_of(piece.parameter).name]
        full.view(-1)[piece.begin : piece.begin + piece.values.numel()] = piece.values


def _put_parameters(trainer: Trainer, into: Mapping[str, Tensor]) -> None:
    for name, parameter in local_parameters(trainer.parts).items():
        into[name][full_index(parameter)] = parameter.detach()
