"""What one process computed: the truth that every rank of the layout compares itself with.

The tensors are small (the model is), their names and shapes follow from the configuration, so the ranks get them
by plain broadcasts, one after the other: no file that all machines would have to see, and no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardweave.comm import Mesh, broadcast
from shardweave.launcher.assembly import DTYPES
from shardweave.launcher.config import Config
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.verify.places import hidden_places
from shardweave.models import parameter_shapes

__all__ = ["Capture", "StepCapture", "share"]


@dataclass(frozen=True)
class StepCapture:
    """One step, whole. Rows of hidden states are samples, in the order of ``samples``."""

    samples: Tensor
    """Numbers of the global batch' samples, int64 ``[n]``; one may be there twice when the data is small."""
    hidden: Mapping[str, Tensor]
    """By place (`hidden_places`): ``[n, sequence, hidden]``."""
    flow: Mapping[str, Tensor]
    """Gradients of the same."""
    gradients: Mapping[str, Tensor]
    """By canonical name, in full shape, before clipping."""
    parameters: Mapping[str, Tensor]
    """By canonical name, in full shape, after the step."""
    numbers: Tensor
    """Loss, gradient norm and learning rate, float64 ``[3]``."""

    @property
    def loss(self) -> float:
        return float(self.numbers[0])

    @property
    def norm(self) -> float:
        """Of the whole gradient, before clipping."""
        return float(self.numbers[1])

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.numbers[2])

    def rows(self, samples: Tensor) -> list[int]:
        """The rows of some samples; of one that is there twice, the first.

        Raises:
            KeyError: for a sample that is not in the batch.
        """
        found: dict[int, int] = {}
        for row, sample in enumerate(self.samples.tolist()):
            found.setdefault(sample, row)
        return [found[sample] for sample in samples.tolist()]

    @classmethod
    def empty(cls, config: Config, device: torch.device) -> StepCapture:
        """Room for a step."""
        shape, dtype, batch = transformer_config(config), DTYPES[config.precision], config.batch.global_
        wide = torch.promote_types(dtype, torch.float32)  # what the optimizer keeps

        def room() -> dict[str, Tensor]:
            size = (batch, shape.sequence, shape.hidden)
            return {
                name: torch.zeros(size, dtype=dtype, device=device) for name in hidden_places(shape.layers)
            }

        return cls(
            samples=torch.zeros(batch, dtype=torch.int64, device=device),
            hidden=room(),
            flow=room(),
            gradients=_parameters(config, wide, device),
            parameters=_parameters(config, dtype, device),
            numbers=torch.zeros(3, dtype=torch.float64, device=device),
        )

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in an order that every rank has."""
        yield self.samples
        yield self.numbers
        for group in (self.hidden, self.flow, self.gradients, self.parameters):
            yield from group.values()


@dataclass(frozen=True)
class Capture:
    """Some steps from the start of a run."""

    start: Mapping[str, Tensor]
    """Initial parameters, in full shape."""
    steps: list[StepCapture] = field(default_factory=list)

    @classmethod
    def empty(cls, config: Config, device: torch.device, steps: int = 0) -> Capture:
        """Room for so many steps; more can be appended."""
        start = _parameters(config, DTYPES[config.precision], device)
        return cls(start, [StepCapture.empty(config, device) for _ in range(steps)])


def share(capture: Capture | None, config: Config, mesh: Mesh, device: torch.device, steps: int) -> Capture:
    """The world's first rank's `capture`, on every rank. All call it; only the first has one."""
    if capture is None:
        capture = Capture.empty(config, device, steps)
    for tensor in (*capture.start.values(), *(tensor for step in capture.steps for tensor in step.tensors())):
        broadcast(tensor, mesh.world)
    return capture


def _parameters(config: Config, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    entries = parameter_shapes(transformer_config(config))
    return {entry.name: torch.zeros(entry.shape, dtype=dtype, device=device) for entry in entries}
