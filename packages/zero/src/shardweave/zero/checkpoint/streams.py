"""The states of a rank's random number generators, as tensors of a checkpoint.

[Note: Random streams and layouts]
    A stream belongs to a rank, and ranks of another layout are other ranks. On the same number of ranks every rank
    goes on with its own stream, bit for bit. On another number nobody has the old streams, so each stream is seeded
    anew from (the saved state of rank 0's, the stream's name, the new rank): reproducible, and no two ranks alike.
    What must be the same in every layout (initial weights, data order, dropout) is not drawn from streams at all but
    from names and positions: see ``shardweave.comm.named_generator`` and ``keyed_dropout``.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardweave.comm.devices import accelerator

__all__ = ["capture_streams", "reseed_streams", "restore_streams"]

Streams = dict[str, Tensor]


def capture_streams(generators: Mapping[str, torch.Generator]) -> Streams:
    """States of Python's, NumPy's (if it is in use) and torch's own generators, and of the given ones."""
    found = {"torch": torch.get_rng_state(), "python": _python_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = _numpy_state(numpy)
    if accelerator() is not None:
        found["accelerator"] = _device_module().get_rng_state()
    for name, generator in generators.items():
        found[f"generator.{name}"] = generator.get_state()
    return {name: state.clone() for name, state in found.items()}


def restore_streams(streams: Mapping[str, Tensor], generators: Mapping[str, torch.Generator]) -> None:
    """The inverse of :func:`capture_streams`; what one side does not have is left as it is."""
    for name, state in streams.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "python":
            words = tuple(state[:-2].tolist())
            gauss = state[-1:].view(torch.float64).item() if bool(state[-2]) else None
            random.setstate((3, words, gauss))
        elif name == "numpy" and "numpy" in sys.modules:
            _set_numpy_state(sys.modules["numpy"], state)
        elif name == "accelerator" and accelerator() is not None:
            _device_module().set_rng_state(state)
        elif (own := generators.get(name.removeprefix("generator."))) is not None:
            own.set_state(state)


def reseed_streams(
    streams: Mapping[str, Tensor], generators: Mapping[str, torch.Generator], rank: int
) -> None:
    """Seeds every stream from rank 0's saved state of it. See [Note: Random streams and layouts]."""

    def seed(name: str) -> int:
        state = bytes(streams[name].view(torch.uint8).tolist()) if name in streams else b""
        return int.from_bytes(hashlib.sha256(state + f"/{name}/{rank}".encode()).digest()[:8], "big") >> 1

    torch.manual_seed(seed("torch"))  # the accelerator's too
    random.seed(seed("python"))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed("numpy") % 2**32)
    for name, generator in generators.items():
        generator.manual_seed(seed(f"generator.{name}"))


def _python_state() -> Tensor:
    """625 words, whether a second Gaussian is waiting, and its bits."""
    _, words, gauss = random.getstate()
    bits = torch.tensor([gauss or 0.0], dtype=torch.float64).view(torch.int64)
    return torch.cat([torch.tensor([*words, gauss is not None], dtype=torch.int64), bits])


def _numpy_state(numpy: Any) -> Tensor:
    """624 words, the position, whether a second Gaussian is waiting, and its bits."""
    _, words, position, has_gauss, gauss = numpy.random.get_state()
    bits = torch.tensor([gauss], dtype=torch.float64).view(torch.int64)
    return torch.cat([torch.tensor([*words.tolist(), position, has_gauss], dtype=torch.int64), bits])


def _set_numpy_state(numpy: Any, state: Tensor) -> None:
    words = numpy.asarray(state[:624].tolist(), dtype=numpy.uint32)
    gauss = state[-1:].view(torch.float64).item()
    numpy.random.set_state(("MT19937", words, int(state[624]), int(state[625]), gauss))


def _device_module() -> Any:
    device = accelerator()
    assert device is not None  # asked before
    return torch.get_device_module(device)
