"""Runs a script as ``python -W error SCRIPT`` does, in a process that has imported torch and nothing else.

It imports no more itself, so that a script that forgot an import fails here as it does for a reader.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings

__all__ = ["run_script"]


def run_script(script: str, folder: str) -> None:
    """Runs the file ``script`` in ``folder`` as ``__main__``."""
    os.chdir(folder)
    sys.argv = [script]
    warnings.resetwarnings()
    warnings.simplefilter("error")
    runpy.run_path(script, run_name="__main__")
