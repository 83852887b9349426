"""What a rank of a job of one purpose does first and last: it joins the others, and leaves them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardweave import comm
from shardweave.comm import Mesh
from shardweave.launcher.agreed_end import agreed_ends
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.layout import layout_of

__all__ = ["joined_mesh"]


@contextmanager
def joined_mesh(config: Config) -> Iterator[Mesh]:
    """The mesh over the world that the environment describes."""
    gc.enable()  # the zygote was forked without collections, see `zygote_first`
    layout = layout_of(config, int(os.environ["WORLD_SIZE"]))
    if config.run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything looks
    comm.init(timeout=config.comm.timeout)
    mesh = mesh_of(config, layout)
    with agreed_ends():
        yield mesh
    mesh.close()
