"""How a rank begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardweave import comm

ENDING = """
import os, sys, time, torch, torch.distributed as dist
from shardweave import comm
rank = int(sys.argv[1])
comm.init(store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2, timeout=30)
mesh = comm.Mesh(dp=2)
kept = comm.start_all_reduce(torch.ones(100_000), mesh.dp)
kept.wait()
print("done", rank)
if int(sys.argv[3]) == 75:
    if rank == 1:
        time.sleep(1)  # rank 0 waits: without it, this collective would lose its peer
    else:
        comm.shutdown(75, together=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(75)
comm.shutdown(int(sys.argv[3]))
"""


def test_a_start_outside_a_launcher_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not in the environment"):
        comm.init()
    with pytest.raises(ValueError, match="given together"):
        comm.init(rank=1)


@pytest.mark.parametrize("code", [0, 7, 75])
def test_shutdown_flushes_and_leaves_with_the_code(tmp_path: Path, code: int) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), str(tmp_path / "store"), str(code)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=150)[0] for process in ranks]
    assert outputs == ["done 0\n", "done 1\n"]
    assert [process.returncode for process in ranks] == [code, code]
