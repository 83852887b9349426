"""How a rank's communication begins and ends.

``torch.distributed.init_process_group`` begins well but ends badly: a correct gloo run aborts at interpreter
exit in 5 to 15 % of cases, when a worker thread drops a tensor that Python owns while the interpreter is
being torn down. So there is one way to end a rank, :func:`shutdown`, which never gets that far.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .devices import local_device
from .guards.watchdog import stop_watchdogs
from .store import environment_store, is_loopback, loopback_interface

__all__ = ["init", "session", "shutdown"]


def init(
    *,
    timeout: float = 300.0,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Joins the world: NCCL when there is a CUDA device, else gloo.

    Without arguments the rank is read from the environment that torchrun sets (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``, ``MASTER_PORT``). With a ``store``, ``rank`` and ``world_size`` are needed too.
    ``timeout``: seconds after which a collective fails instead of waiting for a rank that does not come.

    The first rank serves the store on ``MASTER_ADDR`` alone, and when that is this machine's loopback address, gloo
    is told to use the loopback interface, too (``GLOO_SOCKET_IFNAME``, unless it is set). gloo listens on the address
    of that interface, else on that of the host's name.
    """
    if (store is None) != (rank is None) or (rank is None) != (world_size is None):
        raise ValueError("store, rank and world_size are given together, or none of them")
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if store is None and missing:
        raise ValueError(
            f"{', '.join(missing)} not in the environment: start the ranks with `shardweave train`, torchrun "
            "or srun, or pass store, rank and world_size"
        )
    cuda = local_device().type == "cuda"
    if cuda:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if store is None:
        if is_loopback(os.environ["MASTER_ADDR"]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        store = environment_store(timeout)
        if store is not None:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=timedelta(seconds=timeout),
        store=store,
        rank=-1 if rank is None else rank,
        world_size=-1 if world_size is None else world_size,
    )


def shutdown(code: int = 0, *, together: bool | None = None) -> NoReturn:
    """Ends this rank with exit status ``code``. Nothing runs after it: no ``finally``, no ``atexit``.

    A rank that ends well waits for the others first, so that none of them loses a peer (or the store that
    rank 0 may host) in the middle of a collective; a rank that ends with an error does not wait.
    ``together``: whether all ranks end here, with a status that is not 0 but no error either, and so wait for
    each other; None: if ``code`` is 0.
    """
    if dist.is_initialized() and (code == 0 if together is None else together):
        gc.collect()  # tensors that a gloo thread still refers to are dropped while it can do so
        dist.barrier()
        stop_watchdogs()  # not before: while others hang, this rank still answers that it is here
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def session(
    *,
    timeout: float = 300.0,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[None]:
    """:func:`init` on entry, and on exit the groups are destroyed but the process goes on."""
    init(timeout=timeout, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        gc.collect()
        stop_watchdogs()
        dist.destroy_process_group()
