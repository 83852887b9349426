"""The order of tests, and a cache of their own.

What takes long comes first, so that no worker is left alone with it at the end.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory

import pytest

_CACHE = pytest.StashKey[TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """What tests would keep in the user's cache is removed with them; workers inherit the place."""
    if not hasattr(config, "workerinput"):
        config.stash[_CACHE] = TemporaryDirectory(prefix="shardweave-tests-")
        os.environ["SHARDWEAVE_CACHE"] = config.stash[_CACHE].name


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes it."""
    if _CACHE in config.stash:
        config.stash[_CACHE].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that say how long they may take (``@pytest.mark.timeout``) are the long ones; the longest first."""

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker is not None and marker.args else 0.0

    items.sort(key=limit, reverse=True)
