"""Which device this process computes and communicates on.

``torch.accelerator.current_accelerator()`` names what torch was built for: with the CUDA build, which PyPI serves by
default, that is ``cuda`` also on a laptop without a GPU. So what is there is asked for, too.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["accelerator", "local_device"]


@functools.cache
def accelerator() -> torch.device | None:
    """The kind of accelerator that this machine has one of, without an index; ``None``: it has none."""
    # Not `is_available()`, which may start CUDA in this process, and then no rank can be forked from it. Devices are
    # counted through NVML, where there is one, and that starts nothing.
    return torch.accelerator.current_accelerator() if torch.accelerator.device_count() > 0 else None


def local_device() -> torch.device:
    """Where tensors have to be that this rank sends: on its accelerator (the current device), else on the CPU."""
    return accelerator() or torch.device("cpu")
