"""``python -m shardweave.launcher``: the `shardweave` command, for torchrun and where scripts are not on the path."""

from __future__ import annotations

from shardweave.launcher.cli import main

if __name__ == "__main__":
    main()
