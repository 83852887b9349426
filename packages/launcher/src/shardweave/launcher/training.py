"""A whole run on one rank: resume, steps, evaluations, checkpoints, metrics, until the last step or a stop.

Everything is decided by numbers that all ranks share (the step, the loss, what a checkpoint says), so no rank
leaves the others waiting. One rank writes files and reports; the others compute.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.comm import Mesh, gather_values
from shardweave.comm.files import write_atomically
from shardweave.launcher.checkpoint import Saves, at_start, resume, roll_back
from shardweave.launcher.config import Config
from shardweave.launcher.guards import Guards, RollBack, TrainingStopped
from shardweave.launcher.meter import Meter
from shardweave.launcher.metrics import MetricsFile
from shardweave.launcher.reading import config_text
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.same_data import check_same_data
from shardweave.launcher.sample_log import samples_of_step
from shardweave.launcher.shape import resolved
from shardweave.launcher.stopping import Stop, Stopping
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.training_texts import sampled_text, shown
from shardweave.zero.checkpoint import CheckpointWriteError

__all__ = ["Reporter", "Training"]


@dataclass(frozen=True)
class Reporter:
    """Who wants to hear how the run goes; called on the world's first rank only."""

    record: Callable[[Mapping[str, Any]], None]
    """A line of metrics.jsonl."""
    message: Callable[[str], None]
    """A sentence: resumed, saved, a warning."""


class Training:
    """One rank's side of a run in its directory. Every rank of the mesh builds it and calls `run`."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        run: RunDirectory,
        reporter: Reporter,
        stopping: Stopping,
        restarted: str = "",
    ) -> None:
        self.config, self.run_directory = config, run
        self._mesh = mesh
        self._reporter = reporter
        self._stopping = stopping
        self._restarted = restarted
        self._write_ranks()  # before the work begins: whoever looks for the pids finds them
        self.trainer = Trainer(at_start(config, mesh, run.checkpoints), mesh)
        self._last = min(config.run.steps, config.run.stop_after or config.run.steps)
        self._guards = Guards(config.guard)
        self._saved = -1
        self._saves = Saves(
            mesh.world,
            run.checkpoints,
            keep=config.checkpoint.keep,
            behind=config.checkpoint.async_,
            warn=self._say,
        )
        self._said: Path | None = None
        self._metrics: MetricsFile | None = None
        self._texts: MetricsFile | None = None
        self._samples: MetricsFile | None = None

    def run(self) -> Stop | None:
        """Trains to the last step, or until a stop that the ranks agree on, which is returned.

        Raises:
            ConfigError: for a checkpoint that does not fit this run.
            TrainingStopped, FloatingPointError: when a guard ends it.
            CheckpointWriteError: the last checkpoint could not be written, or two in a row.
        """
        trainer = self.trainer
        path = resume(trainer, self.run_directory.checkpoints, self._say)
        if path is not None:
            self._saved = trainer.step
            self._say(f"resumed from {path} at step {trainer.step}")
        self._guards.restore(trainer.guard_state)
        check_same_data(trainer)
        if self._mesh.world.is_first:
            write_atomically(
                self.run_directory.config, config_text(resolved(self.config, data=self._mesh.dp.size))
            )
        self._open_files()
        if self._restarted:
            self._event("restart", self._restarted)
        try:
            if self._rolls_back and (path is None or path.parent != self.run_directory.checkpoints):
                self._save()  # to have one of its own to go back to
            stop = self._steps()
            self._finish_saves()
            if stop is not None:
                self._stopping.leave(stop)
            return stop
        except (TrainingStopped, FloatingPointError):
            # A guard's, on all ranks: a person goes on from the checkpoint before, and reads the guard's words.
            try:
                self._finish_saves()
            except CheckpointWriteError as error:
                self._tell_unsaved(str(error))
            raise
        finally:
            trainer.close()
            self._close_files()

    def _steps(self) -> Stop | None:
        trainer, settings = self.trainer, self.config
        meter = Meter(trainer)
        self._stopping.begin()
        while trainer.step < self._last:
            if number := self._stopping.agreed(self._mesh.world, trainer.parts.device):
                return self._stop(number)
            meter.start()
            result = trainer.train_step()
            self._record(meter.stop(result).record())
            if (path := self._saves.newly_whole()) is not None:
                self._say_saved(path)
            if settings.data.log_samples:
                self._log_samples()
            try:
                warning = self._guards.check(result)
            except RollBack as asked:
                self._roll_back(str(asked))
                continue
            trainer.guard_state = self._guards.state()
            if warning:
                self._say(f"warning: {warning}")
            done = trainer.step == self._last
            if _due(trainer.step, settings.run.eval_every, done):
                self._evaluate()
            if _due(trainer.step, settings.run.sample_every, done):
                self._sample()
            if _due(trainer.step, settings.checkpoint.every, done):
                self._save()
        stopped_early = settings.run.stop_after is not None and self._last < settings.run.steps
        if stopped_early and self._saved != trainer.step:
            self._save()
        return None

    def _stop(self, number: int) -> Stop:
        """Leaves after the step that is done, with a checkpoint of it, `checkpoint.every: 0` or not."""
        if self._saved != self.trainer.step:
            self._save()
        return Stop(number, self.trainer.step)

    @property
    def _rolls_back(self) -> bool:
        return "rollback" in (self.config.guard.nonfinite, self.config.guard.spike)

    def _roll_back(self, reason: str) -> None:
        """Back to the last checkpoint, and on without the samples of the step that is done."""
        trainer = self.trainer
        self._settle_save()  # it may be the one to go back to
        bad = trainer.began_at, trainer.samples
        trainer.skipped = (*trainer.skipped, bad)
        path = roll_back(trainer, self.run_directory.checkpoints, self._say)
        if path is None:
            raise TrainingStopped(
                f"{reason}; there is no checkpoint in {self.run_directory.checkpoints} to go back to: somebody has "
                "deleted the run's; start over, or use guard.nonfinite=skip and guard.spike=warn"
            )
        self._guards.restore(trainer.guard_state)
        trainer.guard_state = self._guards.state()
        self._saved = -1  # the checkpoint knows nothing of this: a stop from here saves the same step again
        self._close_files()
        self._open_files()
        text = (
            f"{reason}; back to {path.name} and on without samples {bad[0]} to {bad[1] - 1} of the run (rollback "
            f"{self._guards.rollbacks} of {self.config.guard.max_rollbacks}, guard.max_rollbacks)"
        )
        self._event("rollback", text)
        self._say(f"warning: {text}")

    def _open_files(self) -> None:
        """The files that have a line for each step, without what lies behind this one."""
        if not self._mesh.world.is_first:
            return
        directory, step = self.run_directory, self.trainer.step
        self._metrics = MetricsFile(directory.metrics, keep_steps=step)
        if self.config.run.sample_every:
            self._texts = MetricsFile(directory.texts, keep_steps=step)
        if self.config.data.log_samples:
            self._samples = MetricsFile(directory.samples, keep_steps=step)

    def _close_files(self) -> None:
        for file in (self._metrics, self._texts, self._samples):
            if file is not None:
                file.close()

    def _event(self, event: str, reason: str) -> None:
        """A line of metrics.jsonl about what is no step."""
        if self._metrics is not None:
            self._metrics.write({"step": self.trainer.step, "event": event, "reason": reason})

    def _evaluate(self) -> None:
        found = self.trainer.evaluate()
        if found is not None:
            norm = self.trainer.parameter_norm()
            self._record({"step": self.trainer.step, **found.record(), "parameter_norm": norm})

    def _sample(self) -> None:
        step, prompt = self.trainer.step, self.config.run.sample_prompt
        text = sampled_text(self.trainer)
        if self._texts is not None:
            self._texts.write({"step": step, "prompt": prompt, "text": text})
        for line in shown(step, text, str(self.run_directory.texts)):
            self._say(line)

    def _log_samples(self) -> None:
        samples = samples_of_step(self.trainer)
        if self._samples is not None:
            self._samples.write({"step": self.trainer.step, "samples": samples})

    def _save(self) -> None:
        self._settle_save()
        self._said = None  # after a rollback it may be the same step's again
        path = self._saves.save(self.trainer)
        self._saved = self.trainer.step
        if self._saves.pending is None:
            self._say_saved(path)

    def _settle_save(self) -> None:
        """Waits for the checkpoint before; one that failed is told, and the run goes on."""
        pending = self._saves.pending
        failed = self._saves.settle()
        if failed is not None:
            self._tell_unsaved(failed, "; training goes on, and the next checkpoint is tried")
        elif pending is not None:
            self._say_saved(pending)

    def _finish_saves(self) -> None:
        """Waits for the last checkpoint: a run that ends well has it."""
        pending = self._saves.pending
        self._saves.finish()
        if pending is not None:
            self._say_saved(pending)

    def _tell_unsaved(self, failed: str, then: str = "") -> None:
        self._say(f"warning: {failed}{then}")
        self._event("save failed", failed)

    def _say_saved(self, path: Path) -> None:
        if path != self._said:
            self._said = path
            self._say(f"saved {path}")

    def _record(self, record: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(record)
            self._reporter.record(record)

    def _say(self, text: str) -> None:
        if self._mesh.world.is_first:
            self._reporter.message(text)

    def _write_ranks(self) -> None:
        """ranks.json, from what every rank says of itself."""
        world = self._mesh.world
        mine = {
            "rank": world.ranks[
                world.rank
            ],  # places of the mesh are dealt out node by node, ranks perhaps not
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "coordinates": self._mesh.coordinates | _of_experts(self._mesh),
        }
        told = gather_values(mine, world)
        if world.is_first:
            self.run_directory.write_ranks(sorted(told, key=lambda of_rank: int(of_rank["rank"])))


def _due(step: int, interval: int, last: bool) -> bool:
    """Every `interval` steps and after the last one; an interval of 0 means never."""
    return interval > 0 and (step % interval == 0 or last)


def _of_experts(mesh: Mesh) -> dict[str, int]:
    """The position among the ranks that have different experts, if there are several."""
    return {"ep": mesh.ep.rank} if mesh.ep.size > 1 else {}
