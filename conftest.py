"""The order of tests: what takes long comes first, so that no worker is left alone with it at the end."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that say how long they may take (``@pytest.mark.timeout``) are the long ones; the longest first."""

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker is not None and marker.args else 0.0

    items.sort(key=limit, reverse=True)
