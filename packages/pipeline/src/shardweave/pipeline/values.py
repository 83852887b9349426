"""What may pass between two stages, and how a receiver learns its shape.

A receive buffer that is too small ends a gloo process in C++ with no traceback, and one that is too large
waits for ever. So before a value of unknown shape goes a header of fixed size. Gradients need none: they have
the shapes of what was sent forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "HEADER_LENGTH",
    "Signature",
    "TensorSpec",
    "Value",
    "decode",
    "encode",
    "signature_of",
    "tensors_of",
]

Value: TypeAlias = Tensor | tuple[Tensor, ...]
"""A tensor or a tuple of tensors. Integer and boolean tensors carry no gradient."""

HEADER_LENGTH = 128
"""Length of a header in int64: room for 14 tensors of 6 dims."""

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""What a stage may pass on; a header names a dtype by its place here."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Everything a receiver has to know of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{' (grad)' if self.requires_grad else ''}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything a receiver has to know of a value."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool
    """Whether the value is a tuple; a tuple of one is not the same as a tensor."""

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Buffers to receive it into."""
        return tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.tensors)

    def empty_gradients(self, device: torch.device) -> tuple[Tensor, ...]:
        """Buffers for the gradients of those tensors that require one."""
        return tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for spec in self.tensors
            if spec.requires_grad
        )

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "nothing"


def tensors_of(value: object, where: str) -> tuple[Tensor, ...]:
    """The tensors of a value; ValueError, naming ``where``, for anything that is no :data:`Value`."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(item, Tensor) for item in value):
        return value
    inside = f" of {', '.join(type(item).__name__ for item in value)}" if isinstance(value, tuple) else ""
    raise ValueError(
        f"{where} is a {type(value).__name__}{inside}; stages pass on a tensor or a tuple of tensors"
    )


def signature_of(value: Value) -> Signature:
    """The signature of a value as it is now."""
    tensors = (value,) if isinstance(value, Tensor) else value
    specs = tuple(TensorSpec(tuple(item.shape), item.dtype, item.requires_grad) for item in tensors)
    return Signature(specs, not isinstance(value, Tensor))


def encode(signature: Signature, where: str) -> Tensor:
    """The header: an int64 tensor of ``HEADER_LENGTH``: tuple?, count, then dtype, grad?, dims, sizes of each.

    Raises:
        ValueError: a dtype that cannot be passed on, or more than a header holds; it names ``where``.
    """
    numbers = [int(signature.is_tuple), len(signature.tensors)]
    for spec in signature.tensors:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"{where}: {spec.dtype} cannot be passed between stages; cast it first")
        numbers += [_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
    if len(numbers) > HEADER_LENGTH:
        raise ValueError(
            f"{where}: {len(signature.tensors)} tensors with {sum(len(spec.shape) for spec in signature.tensors)} "
            f"dims do not fit a message header of {HEADER_LENGTH} numbers (2 + 3 per tensor + 1 per dim); "
            "pass fewer or stack them"
        )
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)))


def decode(header: Tensor) -> Signature:
    """The inverse of :func:`encode`."""
    numbers: Sequence[int] = header.tolist()
    specs, position = [], 2
    for _ in range(numbers[1]):
        dtype, requires_grad, dims = numbers[position : position + 3]
        shape = tuple(numbers[position + 3 : position + 3 + dims])
        specs.append(TensorSpec(shape, _DTYPES[dtype], bool(requires_grad)))
        position += 3 + dims
    return Signature(tuple(specs), bool(numbers[0]))
