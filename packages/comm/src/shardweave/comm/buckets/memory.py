"""The gradients of one bucket on this rank, before they are reduced, in one contiguous buffer.

[Note: Copy once, then accumulate in place]
    Autograd hands over a parameter's first gradient as a tensor of its own. Letting it accumulate into a
    zeroed view instead costs a fill, two reads and a write (3.1 ms for 5.3 M fp32 elements); copying in the
    hook costs one read and one write (2.2 ms). So the hook copies the first gradient of a window to its place
    and puts the view into ``.grad``; from then on autograd adds in place and the hook has nothing to do.
    ``Tensor.grad_dtype = None`` lets that view be wider than the parameter: bf16 contributions are added
    to a float32 sum.

    A call from Python costs as much as thousands of elements. So small gradients that are final stay where autograd put
    them until the bucket is handed over, which is soon, and are copied with one call for all of them.

[Note: Who owns .grad]
    Between arrival and launch ``.grad`` is a view of the buffer: it can be read and changed. With the launch of
    the reduction the gradient is its owner's, and ``.grad`` reads ``None``; what arrives later starts
    anew and is reduced on top. Nothing is overwritten, whoever calls ``backward`` how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .layout import FlatLayout

__all__ = ["BucketMemory"]

_quietly = torch._C.DisableTorchFunctionSubclass
"""Gradients of parameters of a class of its own, which looks at all that is done with them, are no use of theirs."""

_SMALL = 1 << 12
"""Elements up to which a gradient is small. See [Note: Copy once, then accumulate in place]."""


class _Opened(NamedTuple):
    """A buffer and the gradients' places in it."""

    buffer: Tensor
    views: list[Tensor]


class BucketMemory:
    """The buffer that the gradients of one bucket are collected in.

    ``parameters``: in the order of the layout. ``dtype``: the format their gradients are added up in. ``keep``: whether
    a buffer that was given back is kept for the next step or its memory is freed. ``reopened``: called with a kept one
    before it collects gradients again, for an owner who still reads a part of it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keep: bool,
        reopened: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.layout = layout
        self._dtype, self._device = dtype, device
        self._keep, self._reopened = keep, reopened
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._lent: _Opened | None = None
        """The last buffer that was handed over, if it is kept: making views anew takes its time."""
        self._spare: _Opened | None = None
        self._small = [
            parameter.numel() <= _SMALL and parameter.dtype == dtype for parameter in self.parameters
        ]
        self.arrived: set[int] = set()
        """Slots with a contribution, in the buffer or small and on its way there."""

    @property
    def filled(self) -> set[int]:
        """Slots whose parameter has a gradient now, in the buffer or not."""
        with _quietly():
            return {slot for slot, parameter in enumerate(self.parameters) if parameter.grad is not None}

    @property
    def waiting(self) -> bool:
        """Whether there is a gradient here that was not handed over yet."""
        with _quietly():
            return bool(self.arrived) or any(parameter.grad is not None for parameter in self.parameters)

    def adopt(self, slot: int, *, final: bool = False) -> None:
        """Moves the parameter's ``.grad`` into the buffer, unless it is there already.

        ``final``: :meth:`take` follows before more is added to it; then that may as well do it.
        """
        parameter = self.parameters[slot]
        with _quietly():
            grad = parameter.grad
        if grad is None:
            self.arrived.discard(slot)
            return
        if grad.layout != torch.strided:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient ({grad.layout}); flat "
                f"buffers hold dense ones: build its layer with sparse=False"
            )
        self.arrived.add(slot)
        if final and self._small[slot]:
            return
        view = self._open()[slot]
        if grad is not view:
            view.copy_(grad.detach())
            with _quietly():
                parameter.grad = view

    def take(self) -> Tensor:
        """Hands the whole buffer over: zeros where nothing arrived; every ``.grad`` is ``None`` afterwards."""
        views = self._open()
        missing, places, apart = [], [], []
        with _quietly():
            for parameter, view in zip(self.parameters, views, strict=True):
                grad = parameter.grad
                if grad is None:
                    missing.append(view)
                    continue
                if grad is not view:
                    places.append(view)
                    apart.append(grad.detach())
                parameter.grad = None
        if missing:
            torch._foreach_zero_(missing)
        if apart:
            torch._foreach_copy_(places, apart)
        buffer = self._buffer
        assert buffer is not None
        if self._keep:
            self._lent = _Opened(buffer, views)
        self._buffer, self._views = None, []
        self.arrived.clear()
        return buffer

    def publish(self, buffer: Tensor, present: Sequence[bool]) -> None:
        """Puts a reduced buffer into ``.grad`` of the parameters in ``present``; ``None`` into the others'.

        It is the open buffer from then on: the next gradients go to the same places, whether or not somebody
        forgets these before.
        """
        self._buffer, self._views = self._opened(buffer)
        with _quietly():
            for parameter, view, is_there in zip(self.parameters, self._views, present, strict=True):
                parameter.grad = view if is_there else None

    def give_back(self, buffer: Tensor) -> None:
        """The buffer is not read any more."""
        if self._keep and self._spare is None:
            self._spare = self._opened(buffer)
        self._lent = None

    def clear(self) -> None:
        """Forgets what arrived."""
        with _quietly():
            for parameter in self.parameters:
                parameter.grad = None
        self.arrived.clear()
        if self._buffer is not None:
            self._lent = _Opened(self._buffer, self._views)
            self.give_back(self._buffer)
        self._buffer, self._views = None, []

    def _open(self) -> list[Tensor]:
        if self._buffer is None:
            spare, self._spare = self._spare, None
            if spare is None:
                buffer = torch.empty(self.layout.length, dtype=self._dtype, device=self._device)
                buffer[self.layout.numel :].zero_()
                self._buffer, self._views = buffer, self.layout.views(buffer)
            else:
                if self._reopened is not None:
                    self._reopened(spare.buffer)
                self._buffer, self._views = spare
        return self._views

    def _opened(self, buffer: Tensor) -> _Opened:
        lent, self._lent = self._lent, None
        return (
            lent if lent is not None and lent.buffer is buffer else _Opened(buffer, self.layout.views(buffer))
        )
