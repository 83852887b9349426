"""Eight ranks in every layout under every ZeRO stage, equal to one: ``python -m integration_tests.every_layout``.

What the tests try a third of, in a few minutes. Exit status 1 when a layout parts.
"""

from __future__ import annotations

import sys

from integration_tests.layouts import layouts
from integration_tests.test_equality import differences

__all__ = ["main"]


def main() -> int:
    """Trains them all and prints what is not equal."""
    chosen = list(layouts(8))
    wrong = differences(chosen, 8)
    for layout, found in wrong.items():
        print(f"{layout}: {'; '.join(found)}")
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} layouts equal one process")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
