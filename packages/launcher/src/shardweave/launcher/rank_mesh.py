"""What a rank does first: it joins the others; and last, in a job of one purpose: it leaves them."""

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
from shardweave.launcher.layout import Layout, layout_of

__all__ = ["join_world", "joined_mesh"]


def join_world(config: Config, timeout: float | None = None) -> Layout:
    """Joins the world that the environment describes. `timeout`: in place of the configuration's.

    Raises:
        ConfigError: when the number of ranks and the layout do not match; on every rank, before any message.
    """
    layout = layout_of(config, int(os.environ["WORLD_SIZE"]))
    if config.run.device == "cpu":
        # Before anything looks: `comm` takes the accelerator it finds.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    comm.init(timeout=config.comm.timeout if timeout is None else timeout)
    return layout


@contextmanager
def joined_mesh(config: Config) -> Iterator[Mesh]:
    """The mesh over the world that the environment describes."""
    gc.enable()  # the zygote was forked without collections, see `zygote_first`
    mesh = mesh_of(config, join_world(config))
    with agreed_ends():
        yield mesh
    mesh.close()
