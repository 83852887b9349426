"""Every layout of four and eight ranks under every ZeRO stage: ``python -m integration_tests.every_layout``.

What the tests try a fourth of, in a few minutes, against one process. Exit status 1 when a layout parts.
"""

from __future__ import annotations

import sys

from integration_tests.layouts import layouts
from integration_tests.test_equality import differences

__all__ = ["main"]


def main() -> int:
    """Trains them all and prints what is not equal."""
    status = 0
    for ranks in (4, 8):
        chosen = list(layouts(ranks))
        wrong = differences(chosen, ranks)
        for layout, found in wrong.items():
            print(f"{layout}: {'; '.join(found)}")
        print(f"{len(chosen) - len(wrong)} of {len(chosen)} layouts of {ranks} ranks equal one process")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main())
