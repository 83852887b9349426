"""``shardweave import`` and ``shardweave export``: directories of Hugging Face files to runs, and back.

Both start as many local ranks as the layout on the command line has, each of which reads and writes only its own
slices: a model that no rank could hold passes through all the same. What can be wrong is found before one starts.

A run that was imported has a checkpoint of step 0, from which `train` goes on, a configuration that says the whole
shape and where the files are, so that a run of another name or place begins with them too, and the directory
``huggingface`` with what is no weight: tokenizer files and ``config.json``. An export gives these back.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardweave.launcher.on_ranks import ONE_PROCESS, on_ranks, started_by_others
from shardweave.launcher.zygote_first import with_zygote

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote
    from shardweave.launcher.config import Config
    from shardweave.launcher.run_directory import RunDirectory
    from shardweave.models import TransformerConfig

__all__ = ["export_run", "import_directory"]

_RANK = "shardweave.launcher.import_export_rank"


def import_directory(directory: Path, out: Path, overrides: tuple[str, ...], port: int) -> int:
    """Makes the run `out` of the files in `directory`; returns the exit status."""
    if started := started_by_others("import"):
        return started
    return with_zygote([_RANK], lambda zygote: _import(directory, out, overrides, port, zygote))


def export_run(
    run: Path,
    out: Path,
    overrides: tuple[str, ...],
    *,
    family: str | None,
    dtype: str | None,
    shard_size: str,
    port: int,
) -> int:
    """Writes the newest checkpoint of `run`, or the checkpoint that it names, to `out`; returns the exit status."""
    if started := started_by_others("export"):
        return started
    options = {"family": family, "dtype": dtype, "shard_size": shard_size, "out": str(out.absolute())}
    return with_zygote([_RANK], lambda zygote: _export(run, overrides, options, port, zygote))


def _import(directory: Path, out: Path, overrides: tuple[str, ...], port: int, zygote: Zygote) -> int:
    from shardweave.comm.files import write_atomically
    from shardweave.launcher.assembly import source_of
    from shardweave.launcher.layout import batch_plan, check_fit, layout_of
    from shardweave.launcher.problems import ConfigError, Problem
    from shardweave.launcher.reading import config_text, read_config
    from shardweave.launcher.run_directory import RunDirectory
    from shardweave.launcher.shape import resolved, transformer_config
    from shardweave.models import HuggingFaceError, huggingface_config
    from shardweave.models.huggingface import copy_tokenizer

    try:
        found = huggingface_config(directory)
    except HuggingFaceError as error:
        raise ConfigError([Problem((), str(error))]) from None
    if out.exists():
        raise ConfigError([Problem((), f"--out {out} exists; give a directory that is not there yet")])
    place = [f"run.name={json.dumps(out.name)}", f"run.dir={json.dumps(str(out.parent))}"]
    loaded = read_config(None, [*place, *_keys(found), *overrides])
    config = loaded.config
    layout, shape = layout_of(config), transformer_config(config)
    check_fit(config, layout, shape)
    batch_plan(config, layout)
    block = config.model
    reading = config.model_copy(
        update={"model": block.model_copy(update={"weights": str(directory.absolute())})}
    )
    source_of(reading, shape)  # looks at the headers
    run = RunDirectory.of(config)
    run.huggingface.mkdir(parents=True)
    copy_tokenizer(directory, run.huggingface)
    shutil.copyfile(directory / "config.json", run.huggingface / "config.json")
    reading = _with_tokenizer(reading, run, overrides)
    status = on_ranks(
        f"{_RANK}:import_main",
        {"config": reading.plain(), "run": str(run.path)},
        layout.world_size,
        port,
        zygote,
        undone="nothing was written",
    )
    if status:
        shutil.rmtree(run.path, ignore_errors=True)
        return status
    write_atomically(run.config, config_text(resolved(reading, data=layout.data)))
    print(f"{run.path} has the weights of {directory}; shardweave train {run.config} trains it")
    return 0


def _with_tokenizer(config: Config, run: RunDirectory, overrides: tuple[str, ...]) -> Config:
    """`config` with the tokenizer that came along, unless there is none, another is asked for, or it cannot be used,
    which is said."""
    from shardweave.launcher.data.errors import DataError
    from shardweave.launcher.data.tokenizer import open_tokenizer
    from shardweave.models.huggingface import TOKENIZER_FILES

    asked = any(override.partition("=")[0].strip() in ("data", "data.tokenizer") for override in overrides)
    found = any(
        (run.huggingface / name).is_file() for name in TOKENIZER_FILES if name != "generation_config.json"
    )
    if asked or not found:
        return config
    place = str(run.huggingface.absolute())
    try:
        tokens = open_tokenizer(place, config.data.end_of_text).vocab
        if config.model.vocab != "auto" and tokens > config.model.vocab:
            raise DataError(f"it has {tokens} tokens, and the model {config.model.vocab}")
    except DataError as error:
        text = f"the tokenizer that came along is not used, and text is bytes: {error}"
        print(f"warning: {text}; name another with data.tokenizer", file=sys.stderr)
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": place})})


def _export(
    path: Path, overrides: tuple[str, ...], options: dict[str, str | None], port: int, zygote: Zygote
) -> int:
    from shardweave.launcher.generate import locate
    from shardweave.launcher.layout import check_fit, layout_of
    from shardweave.launcher.problems import ConfigError, Problem
    from shardweave.launcher.reading import read_config
    from shardweave.launcher.run_directory import RunDirectory
    from shardweave.launcher.shape import transformer_config
    from shardweave.models import HuggingFaceError
    from shardweave.models.huggingface.families import family_for
    from shardweave.models.huggingface.files import byte_count
    from shardweave.zero.checkpoint import CheckpointError, read_manifest

    try:
        run, checkpoint = locate(path)
        read_manifest(checkpoint)
        config = read_config(run / "config.yaml", [*ONE_PROCESS, *overrides]).config
        layout, shape = layout_of(config), transformer_config(config)
        check_fit(config, layout, shape)
        family_for(shape, options["family"])
        byte_count(options["shard_size"] or "")
    except (CheckpointError, HuggingFaceError) as error:
        raise ConfigError([Problem((), str(error))]) from None
    except ConfigError:
        raise
    except ValueError as error:  # no family
        raise ConfigError([Problem((), str(error))]) from None
    if Path(str(options["out"])).exists():
        raise ConfigError(
            [Problem((), f"--out {options['out']} exists; give a directory that is not there yet")]
        )
    aside = _tokenizer_files(config, RunDirectory(run))
    payload: dict[str, object] = {
        "config": config.plain(),
        "checkpoint": str(checkpoint),
        "tokenizer_from": None if aside is None else str(aside),
        "end_of_text": _end_of_text(config, run),
        **options,
    }
    status = on_ranks(
        f"{_RANK}:export_main", payload, layout.world_size, port, zygote, undone="nothing was written"
    )
    if not status:
        print(f"{options['out']} has the weights of {checkpoint}")
    return status


def _end_of_text(config: Config, run: Path) -> int | None:
    """The token of that name in the run's texts; None where the tokenizer's files are gone."""
    from shardweave.launcher.generate import words_of
    from shardweave.launcher.problems import ConfigError

    try:
        return words_of(config, run).end_of_text
    except ConfigError:
        return None


def _tokenizer_files(config: Config, run: RunDirectory) -> Path | None:
    """The directory of the run's tokenizer: what an import brought along, or what `data.tokenizer` names."""
    if run.huggingface.is_dir():
        return run.huggingface
    named = Path(config.data.tokenizer).expanduser()
    if config.data.tokenizer == "byte" or not named.exists():
        return None
    return named if named.is_dir() else named.parent


def _keys(shape: TransformerConfig) -> Iterator[str]:
    """The keys of the `model` block of this shape, as overrides."""
    from shardweave.launcher.shape import shared_keys

    for key, value in shared_keys(shape).items():
        yield f"model.{key}={json.dumps(value)}"
