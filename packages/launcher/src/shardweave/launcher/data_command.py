"""``shardweave data``: files of text become files of tokens, and files of tokens are looked at.

Runs in one process that imports no torch: what the commands do is in `shardweave.launcher.data`.
"""

from __future__ import annotations

import click

from shardweave.launcher.data_build_command import build, train_tokenizer
from shardweave.launcher.data_inspect_command import inspect, merge

__all__ = ["data"]


@click.group()
def data() -> None:
    """Prepares what a run trains on. PREFIX names a pair of files, PREFIX.bin and PREFIX.idx, as Megatron's.

    \b
    Example:
      shardweave data inspect corpora/wiki
    """


data.add_command(build)
data.add_command(train_tokenizer)
data.add_command(inspect)
data.add_command(merge)
