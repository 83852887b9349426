"""Compares what one rank holds with the same part of what one process computed.

What a difference is relative to decides whether noise looks like a mistake, or a mistake like noise:

hidden states, flow   the largest entry at that place in the whole batch
loss, norm            the number itself
gradient              the tensor's largest entry, or a thousandth of that of its piece (block, embedding, head) if it is
                      more: sums that cancel, as a key bias' do because softmax does not see it, are rounding noise of
                      terms of that size
parameter             the tensor's largest entry and the sum of the learning rates, and what rounding of its gradients
                      may have moved the element, see [Note: Sway]

[Note: Sway]
    In step k Adam moves an element by ``rate_k * m / (sqrt(v) + eps)``, with ``m / sqrt(v)`` in [-1, 1] or so. If its
    gradient g is off by d, that changes by at most ``2 min(1, d / (g + eps))``. With d the accepted difference of
    gradients, this is how far rounding alone can have driven the element; it adds up over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardweave.comm import full_index, sharding_of
from shardweave.launcher.config import Config
from shardweave.launcher.trainer import StepResult
from shardweave.launcher.verify.capture import Capture, StepCapture
from shardweave.launcher.verify.difference import Difference, largest_difference
from shardweave.launcher.verify.explanation import factor_remark, record_remark, sample_remark
from shardweave.launcher.verify.places import Kind
from shardweave.launcher.verify.tolerances import tolerance_of
from shardweave.launcher.verify.watching import GradientPiece, HiddenPart, Seen

__all__ = ["Comparison"]

_SHARE_OF_PIECE = 1e-3
_ADAPTIVE = ("adam", "adamw")


class Comparison:
    """One rank's comparisons, step after step. All differences are kept, those of zero too."""

    def __init__(self, config: Config, capture: Capture, rank: int) -> None:
        self.differences: list[Difference] = []
        self._config, self._capture, self._rank = config, capture, rank
        self._step = 0
        self._travelled = 0.0
        self._steepest = {name: torch.zeros_like(value) for name, value in self._right_gradients(0)}
        self._sway = {name: torch.zeros_like(value) for name, value in self._right_gradients(0)}

    def start(self, parameters: Mapping[str, Tensor]) -> None:
        """Compares the initial `parameters`: this rank's part of them, by canonical name."""
        for name, local in parameters.items():
            right = self._capture.start[name]
            self._compare("start", name, local, right[full_index(local)], right.abs().max(), local)

    def step(self, result: StepResult, seen: Seen, parameters: Mapping[str, Tensor]) -> None:
        """Compares the next step."""
        right = self._capture.steps[self._step]
        self._step += 1
        # A step that overflows is skipped, in every layout; where it overflows depends on the order of its sums.
        skipped = not math.isfinite(right.norm)
        for part in seen.hidden:
            if not (skipped and part.kind in ("flow", "sent")):
                self._hidden(part, right)
        self._number("loss", result.loss, right.loss)
        scales = _gradient_scales(right.gradients)
        for piece in () if skipped else seen.gradients:
            self._gradient(piece, right, scales)
        if not (skipped and result.skipped):
            self._number("norm", result.grad_norm, right.norm)
        if not skipped:
            self._move(right, scales)
        for name, local in parameters.items():
            self._parameter(name, local, right)

    def _right_gradients(self, step: int) -> list[tuple[str, Tensor]]:
        return list(self._capture.steps[step].gradients.items()) if self._capture.steps else []

    def _hidden(self, part: HiddenPart, right: StepCapture) -> None:
        whole = (right.flow if part.kind in ("flow", "sent") else right.hidden)[part.place]
        try:
            rows = right.rows(part.samples)
        except KeyError as stranger:
            text = f"sample {stranger} is not in this step's batch of one process"
            self._add(part.kind, part.place, math.inf, remark=text)
            return
        samples = part.samples.tolist()
        ours = part.values.transpose(0, 1)  # [b, s, h], as the capture has it
        reference = whole[rows][:, part.positions]
        scale = whole.abs().max()
        relative, place = largest_difference(ours, reference, scale)
        tolerance, remark = tolerance_of(part.kind, self._config.precision), ""
        row, position, feature = _unravelled(place, ours.shape)
        if not relative <= tolerance:
            remark = sample_remark(
                ours[row],
                whole[:, part.positions],
                right.samples.tolist(),
                samples[row],
                float(scale) * tolerance,
            ) or factor_remark(ours, reference, float(scale), tolerance)
        self._add(
            part.kind, part.place, relative, float(scale), ours[row, position, feature],
            reference[row, position, feature], (samples[row], int(part.positions[position]), feature), remark,
        )  # fmt: skip

    def _number(self, kind: Kind, ours: float, reference: float) -> None:
        a, b = torch.tensor([[ours], [reference]], dtype=torch.float64)
        relative, _ = largest_difference(a, b, b.abs())
        remark = f"it is {ours / reference:.6g} times the right one" if reference else ""
        self._add(kind, "", relative, abs(reference), a[0], b[0], (), remark if relative else "")

    def _gradient(self, piece: GradientPiece, right: StepCapture, scales: Mapping[str, Tensor]) -> None:
        name = sharding_of(piece.parameter).name
        local = right.gradients[name][full_index(piece.parameter)]
        reference = local.flatten()[piece.begin : piece.begin + piece.values.numel()]
        self._compare(
            "gradient", name, piece.values, reference, scales[name], piece.parameter, begin=piece.begin
        )

    def _move(self, right: StepCapture, scales: Mapping[str, Tensor]) -> None:
        """Brings the distances up to date. See [Note: Sway]."""
        optimizer = self._config.optimizer
        self._travelled += right.rate
        accepted = tolerance_of("gradient", self._config.precision)
        for name, gradient in right.gradients.items():
            off = accepted * scales[name]
            if optimizer.name in _ADAPTIVE:
                steepest = self._steepest[name] = torch.maximum(self._steepest[name], gradient.abs())
                off = 2.0 * (off / (steepest + optimizer.eps)).clamp(max=1.0)
            self._sway[name] = self._sway[name] + right.rate * off

    def _parameter(self, name: str, local: Tensor, right: StepCapture) -> None:
        whole, where = right.parameters[name], full_index(local)
        tolerance = tolerance_of("parameter", self._config.precision)
        scale = whole.abs().max().double() + self._travelled + self._sway[name][where].double() / tolerance
        self._compare("parameter", name, local, whole[where], scale, local)

    def _compare(
        self,
        kind: Kind,
        name: str,
        ours: Tensor,
        reference: Tensor,
        scale: Tensor,
        parameter: Tensor,
        *,
        begin: int = 0,
    ) -> None:
        """A parameter's, or its gradient's, elements from ``begin`` on of what is here of it."""
        relative, place = largest_difference(ours, reference, scale)
        tolerance, remark = tolerance_of(kind, self._config.precision), ""
        at = float(scale if scale.numel() == 1 else scale.flatten()[place])
        if not relative <= tolerance:
            found = factor_remark(ours, reference, at, tolerance)
            block = self._config.parallel
            spread = block.tensor * block.pipeline * block.expert > 1
            record = record_remark(sharding_of(parameter)) if spread else ""
            remark = "; ".join(text for text in (found, record) if text)
        inside = _unravelled(begin + place, parameter.shape)
        index = tuple(where.start + here for where, here in zip(full_index(parameter), inside, strict=True))
        a, b = ours.flatten()[place], reference.flatten()[place]
        self._add(kind, name, relative, at, a, b, index, remark)

    def _add(
        self,
        kind: Kind,
        name: str,
        relative: float,
        scale: float = math.nan,
        ours: Tensor | float = math.nan,
        reference: Tensor | float = math.nan,
        index: tuple[int, ...] = (),
        remark: str = "",
    ) -> None:
        tolerance = tolerance_of(kind, self._config.precision, self._step)
        self.differences.append(
            Difference(
                kind, self._step, name, self._rank, relative, tolerance, scale, float(ours), float(reference), index,
                remark,
            )
        )  # fmt: skip


def _gradient_scales(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each parameter's gradient is judged by."""
    largest = {name: gradient.abs().max() for name, gradient in gradients.items()}
    pieces: dict[str, Tensor] = {}
    for name, entry in largest.items():
        piece = _piece_of(name)
        pieces[piece] = torch.maximum(pieces.get(piece, entry), entry)
    return {
        name: torch.maximum(entry, _SHARE_OF_PIECE * pieces[_piece_of(name)])
        for name, entry in largest.items()
    }


def _piece_of(name: str) -> str:
    """``layers.3`` of a block's parameter; the others stand for themselves."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]


def _unravelled(place: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        place, inside = divmod(place, size)
        index.append(inside)
    return tuple(reversed(index))
