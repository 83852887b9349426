"""The device that a rank uses: what is there, not what torch was built for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shardweave import comm
from shardweave.comm import Mesh, Topology, broadcast_value, gather_values, measure_links
from shardweave.comm.devices import accelerator, local_device

CPU = torch.device("cpu")


@contextmanager
def cuda_build(devices: int) -> Iterator[None]:
    """torch as built for CUDA, on a machine with so many GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "device_count", lambda: devices)
        accelerator.cache_clear()
        try:
            yield
        finally:
            accelerator.cache_clear()


def test_an_accelerator_is_one_that_is_there() -> None:
    with cuda_build(0):
        assert (accelerator(), local_device()) == (None, CPU)
    with cuda_build(2):
        assert accelerator() == local_device() == torch.device("cuda")


@pytest.mark.ranks(2)
def test_without_a_gpu_ranks_of_a_cuda_build_use_the_cpu(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    with cuda_build(0):
        comm.init(store=FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        assert dist.get_backend() == "gloo"
        mesh = Mesh(dp=2, topology=Topology.discover())
        comm.barrier(mesh.dp)
        assert gather_values(rank, mesh.dp) == [0, 1]
        assert broadcast_value(rank, mesh.dp) == 0
        assert measure_links(mesh.topology, mesh.world).links.measured == ("node",)
        mesh.close()
