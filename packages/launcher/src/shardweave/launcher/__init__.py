"""The `shardweave` command, and the library under it: one YAML file, local or joined ranks, a whole training run.

==================  ===========================================================================================
configuration       :class:`Config`, :func:`load_config`: the schema, strictly read; :class:`ConfigError`
arithmetic          :class:`Layout`, :func:`layout_of`, :func:`batch_plan`: ranks, stages and batches, nothing started
training            :class:`Trainer` on a mesh; :func:`train_in_process`: what every layout must agree on
sameness            :func:`verify_layout`: a layout held against one process, and the place where they part
command             :mod:`.cli`, and below it `local` (starts ranks), `join` (is one of them), `rank` (what each runs)
==================  ===========================================================================================

Names are imported when they are first used: the command has to fork the process of its ranks before torch and
everything else is loaded, and importing a submodule of a package imports the package first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardweave.launcher._version import __version__
from shardweave.launcher.data.when_used import when_used

if TYPE_CHECKING:
    from shardweave.launcher.config import Config
    from shardweave.launcher.layout import BatchPlan, Layout, batch_plan, layout_of
    from shardweave.launcher.problems import ConfigError
    from shardweave.launcher.reading import load_config
    from shardweave.launcher.statistics import StepStatistics
    from shardweave.launcher.trainer import Record, StepResult, Trainer, train_in_process
    from shardweave.launcher.verify.difference import Difference
    from shardweave.launcher.verify.layout import verify_layout
    from shardweave.launcher.verify.report import Parting, Report

__all__ = [
    "BatchPlan",
    "Config",
    "ConfigError",
    "Difference",
    "Layout",
    "Parting",
    "Record",
    "Report",
    "StepResult",
    "StepStatistics",
    "Trainer",
    "__version__",
    "batch_plan",
    "layout_of",
    "load_config",
    "train_in_process",
    "verify_layout",
]

_HOME = {
    "BatchPlan": "layout",
    "Config": "config",
    "ConfigError": "problems",
    "Difference": "verify.difference",
    "Layout": "layout",
    "Parting": "verify.report",
    "Record": "trainer",
    "Report": "verify.report",
    "StepResult": "trainer",
    "StepStatistics": "statistics",
    "Trainer": "trainer",
    "batch_plan": "layout",
    "layout_of": "layout",
    "load_config": "reading",
    "train_in_process": "trainer",
    "verify_layout": "verify.layout",
}

__getattr__, __dir__ = when_used(__name__, _HOME)
