"""What may pass between two stages, and how a receiver learns its shape and its names.

A receive buffer that is too small ends a gloo process in C++ with no traceback, and one that is too large
waits for ever. So before a value of unknown shape goes a header of fixed size. Gradients need none: they have
the shapes of what was sent forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "HEADER_LENGTH",
    "Headers",
    "Signature",
    "TensorSpec",
    "Value",
    "decode",
    "encode",
    "names_of",
    "parts_of",
    "signature_of",
    "tensors_of",
]

Value: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""A tensor, a tuple of tensors (the next stage's positional arguments) or a dict of them (its keyword arguments).

Integer and boolean tensors carry no gradient.
"""

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

    @property
    def num_bytes(self) -> int:
        """Of its memory."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{' (grad)' if self.requires_grad else ''}"


@dataclass(frozen=True)
class Signature:
    """Everything a receiver has to know of a value."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool
    """Whether the value is a tuple; a tuple of one is not the same as a tensor."""
    names: tuple[str, ...] | None = None
    """Those of a dict, one per tensor; ``None`` for other values."""

    @cached_property
    def wanted(self) -> tuple[bool, ...]:
        """Of which tensors a gradient is wanted."""
        return tuple(spec.requires_grad for spec in self.tensors)

    def describes(self, value: Value) -> bool:
        """Whether it is the signature of ``value``; far quicker than making that."""
        parts = parts_of(value)
        if isinstance(value, tuple) != self.is_tuple or len(parts) != len(self.tensors):
            return False
        for part, spec in zip(parts, self.tensors, strict=True):
            if (part.shape, part.dtype, part.requires_grad) != (spec.shape, spec.dtype, spec.requires_grad):
                return False
        return names_of(value) == self.names

    def empty(self, device: torch.device) -> list[Tensor]:
        """Buffers to receive it into."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.tensors]

    def empty_gradients(self, device: torch.device) -> list[Tensor]:
        """Buffers for the gradients of those tensors that require one."""
        return [
            torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for spec in self.tensors
            if spec.requires_grad
        ]

    def __str__(self) -> str:
        if self.names is not None:
            return ", ".join(f"{name}: {spec}" for name, spec in zip(self.names, self.tensors, strict=True))
        return ", ".join(map(str, self.tensors)) or "nothing"


def tensors_of(value: object, where: str) -> tuple[Tensor, ...]:
    """The tensors of a value; ValueError, naming ``where``, for anything that is no :data:`Value`."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(item, Tensor) for item in value):
        return value
    if isinstance(value, dict) and value and all(map(_is_named, value.items())):
        return tuple(value.values())
    raise ValueError(
        f"{where} is a {type(value).__name__}{_inside(value)}; stages pass on a tensor, a tuple of tensors, or a dict "
        "of tensors by name"
    )


def _is_named(item: tuple[object, object]) -> bool:
    name, tensor = item
    return isinstance(name, str) and isinstance(tensor, Tensor)


def _inside(value: object) -> str:
    if isinstance(value, tuple):
        return f" of {', '.join(type(item).__name__ for item in value)}"
    if isinstance(value, dict):
        return f" of {', '.join(f'{name!r}: {type(item).__name__}' for name, item in value.items()) or 'nothing'}"
    return ""


def parts_of(value: Value) -> tuple[Tensor, ...]:
    """As :func:`tensors_of`, of what is known to be a value."""
    if isinstance(value, Tensor):
        return (value,)
    return tuple(value.values()) if isinstance(value, dict) else value


def names_of(value: Value) -> tuple[str, ...] | None:
    """The names of a dict's tensors, in its order; ``None`` for other values."""
    return tuple(value) if isinstance(value, dict) else None


def signature_of(value: Value) -> Signature:
    """The signature of a value as it is now."""
    specs = tuple(TensorSpec(tuple(item.shape), item.dtype, item.requires_grad) for item in parts_of(value))
    return Signature(specs, isinstance(value, tuple), names_of(value))


class Headers:
    """:func:`encode` and :func:`decode`, remembering what was seen: most micro-batches look like the one before."""

    _MOST = 256
    """Beyond it everything is forgotten: sequences of any length must not pile up."""

    def __init__(self) -> None:
        self._encoded: dict[Signature, Tensor] = {}
        self._decoded: dict[tuple[int, ...], Signature] = {}
        # The last ones, which need no look into a dictionary.
        self._sent: tuple[Signature, Tensor] | None = None
        self._read: tuple[Tensor, Signature] | None = None

    def encode(self, signature: Signature, where: str, device: torch.device) -> Tensor:
        """The header on ``device``, which nobody may write to; errors as in :func:`encode`."""
        if self._sent is not None and signature is self._sent[0]:
            return self._sent[1]
        header = self._encoded.get(signature)
        if header is None:
            if len(self._encoded) >= self._MOST:
                self._encoded.clear()
            header = self._encoded[signature] = encode(signature, where).to(device)
        self._sent = signature, header
        return header

    def decode(self, header: Tensor) -> Signature:
        """What the header says."""
        if self._read is not None and torch.equal(header, self._read[0]):
            return self._read[1]
        numbers = tuple(header.tolist())
        signature = self._decoded.get(numbers)
        if signature is None:
            if len(self._decoded) >= self._MOST:
                self._decoded.clear()
            signature = self._decoded[numbers] = decode(header)
        self._read = header, signature
        return signature


def encode(signature: Signature, where: str) -> Tensor:
    """The header, an int64 tensor of ``HEADER_LENGTH``.

    It says whether the value is a tensor (0), a tuple (1) or a dict (2), the count, then dtype, grad?, dims and sizes
    of each, and the names of a dict, each as its number of bytes and these, 8 in a number.

    Raises:
        ValueError: a dtype that cannot be passed on, or more than a header holds; it names ``where``.
    """
    names = signature.names or ()
    numbers = [2 if signature.names is not None else int(signature.is_tuple), len(signature.tensors)]
    for spec in signature.tensors:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"{where}: {spec.dtype} cannot be passed between stages; cast it first")
        numbers += [_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
    for name in names:
        text = name.encode()
        numbers.append(len(text))
        numbers += [_number(text[at : at + 8]) for at in range(0, len(text), 8)]
    if len(numbers) > HEADER_LENGTH:
        named = f" and the names {', '.join(names)}" if names else ""
        also = "; a name takes 1 + 1 per 8 bytes" if names else ""
        raise ValueError(
            f"{where}: {len(signature.tensors)} tensors with {sum(len(spec.shape) for spec in signature.tensors)} "
            f"dims{named} do not fit a message header of {HEADER_LENGTH} numbers (2 + 3 per tensor + 1 per dim{also}); "
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
    if numbers[0] != 2:
        return Signature(tuple(specs), bool(numbers[0]))
    names = []
    for _ in specs:
        length = numbers[position]
        end = position + 1 + -(-length // 8)
        names.append(b"".join(map(_bytes, numbers[position + 1 : end]))[:length].decode())
        position = end
    return Signature(tuple(specs), is_tuple=False, names=tuple(names))


def _number(text: bytes) -> int:
    return int.from_bytes(text.ljust(8, b"\0"), "little", signed=True)


def _bytes(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)
