"""The parameters of a unit that is whole only while somebody uses it (ZeRO stage 3).

Between uses each rank keeps its own part, and the buffer has no memory::

    released    own      [ part of this rank ]
                buffer   shape and views, no memory
    gathered    buffer   [ a.weight          | a.bias | b.weight                | b.bias |pad]   all-gather of parts

The buffer stays one tensor with one storage, which is emptied and filled again. So the parameters stay views of it, and
so do the tensors that autograd saved in the forward pass: filled again, they are what they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Pending, start_all_gather

from .flat import FlatParameters
from .units import UnitPlan

__all__ = ["GatheredParameters"]


class GatheredParameters(FlatParameters):
    """As :class:`FlatParameters`, whole until :meth:`settle`, and from then on after :meth:`gather` only.

    ``axis``: the ranks that it is sharded over. :attr:`own`: this rank's part, 1-D, in the format of the buffer.
    """

    def __init__(self, plan: UnitPlan, parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        super().__init__(plan, parameters)
        self._axis = axis
        self._start, self._stop = plan.shard_range(axis.rank)
        self.own = self.buffer[self._start : self._stop]
        self._bytes = self._storage = 0
        self._pending: Pending[Tensor] | None = None
        self._touched: set[int] = set()
        self.live = True
        """Whether the buffer has memory: gathered, or about to be."""

    @property
    def whole(self) -> bool:
        """Whether the values are there now."""
        return self.live and self._pending is None

    def part(self, start: int, stop: int) -> Tensor:
        """See :meth:`FlatParameters.part`; of this rank's own range."""
        if (start, stop) != (self._start, self._stop):
            raise AssertionError("a rank has its own part of a sharded unit only")
        return self.own

    def settle(self, dtype: torch.dtype) -> None:
        """See :meth:`FlatParameters.settle`. Then takes this rank's part out of the buffer, which is released."""
        if not self._bytes:
            super().settle(dtype)
            self.own = self.buffer[self._start : self._stop].clone()
            self._bytes = self.buffer.untyped_storage().nbytes()
            self._storage = self.buffer.untyped_storage()._cdata  # the same, whatever memory is in it
            self.release()

    def start_gather(self) -> None:
        """Gives the buffer memory and launches its all-gather; collective over the axis."""
        if not self.live:
            self.buffer.untyped_storage().resize_(self._bytes)
            self.live = True
            self._pending = start_all_gather(self.own, self._axis, sizes=self.plan.sizes, out=self.buffer)

    def gather(self) -> None:
        """Afterwards the values are there; collective unless they are, or :meth:`start_gather` was called."""
        self.start_gather()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def release(self) -> None:
        """Frees the buffer. What somebody wrote into the parameters is kept in this rank's part."""
        if self.live:
            self.gather()  # memory that is being written to is not freed
            self._keep_writes()
            self.buffer.untyped_storage().resize_(0)
            self.live = False

    def touch(self) -> None:
        """Somebody writes to the values without moving a version."""
        self._touched.update(range(len(self.parameters)))

    def written(self) -> list[int]:
        """See :meth:`FlatParameters.written`; also what was written before it was last released."""
        if self.whole:
            self._keep_writes()
        touched, self._touched = sorted(self._touched), set()
        return touched

    def forget_written(self) -> None:
        """See :meth:`FlatParameters.forget_written`."""
        with torch._C.DisableTorchFunctionSubclass():
            super().forget_written()
        self._touched.clear()

    def gather_again(self) -> None:
        """This rank's part has other values now, and others' have: brings them into a buffer that is whole."""
        self._pending = start_all_gather(self.own, self._axis, out=self.buffer)
        self.gather()

    def check_in_place(self, names: Sequence[str]) -> None:
        """See :meth:`FlatParameters.check_in_place`."""
        with torch._C.DisableTorchFunctionSubclass():
            super().check_in_place(names)

    def _address(self, parameter: Tensor) -> int:
        """Its storage: the memory in it comes and goes."""
        return int(parameter.untyped_storage()._cdata)

    def shares(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the buffer."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False  # it has no memory of its own to ask for
        return bool(tensor.untyped_storage()._cdata == self._storage)

    def _keep_writes(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._touched.update(super().written())
        if self._touched and self.own.data_ptr() != self.buffer[self._start : self._stop].data_ptr():
            self.own.copy_(self.buffer[self._start : self._stop])
