"""From a file and overrides to a `Config`, or to every problem at once with its file and line.

The order of what is looked at: YAML, overrides, the preset under the keys that are given, the schema, then the
rules between settings and what is not built yet. Everything here is decided without a process or a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from shardweave.launcher.config import Config
from shardweave.launcher.problems import ConfigError, Problem, explain, unknown_key
from shardweave.launcher.rules import contradictions, idle
from shardweave.launcher.shape import preset_keys, transformer_config
from shardweave.launcher.strict_yaml import Path, YamlError, dump, load, path_text
from shardweave.launcher.unbuilt import unbuilt

__all__ = ["Loaded", "config_text", "load_config", "read_config"]

_COMMAND_LINE = "command line"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True)
class Loaded:
    """A configuration with what only its reader knows."""

    config: Config
    warnings: tuple[str, ...] = ()
    """Settings that have no effect, a sentence each."""
    origins: Mapping[Path, str] = field(default_factory=dict)
    """Where each value was written: ``run.yaml:3`` or ``command line``."""


def load_config(path: str | FilePath | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file at `path` (None: the defaults) with ``KEY=VALUE`` `overrides` applied.

    Keys are dotted (``parallel.tensor=2``), values are YAML, the last of repeated overrides wins.

    Raises:
        ConfigError: for anything that cannot be run: the text has a line per problem, with file and line, the
            value, the rule and the nearest valid choice.
    """
    return read_config(path, overrides).config


def read_config(path: str | FilePath | None = None, overrides: Sequence[str] = ()) -> Loaded:
    """Like `load_config`, with warnings and the places where values were written."""
    raw, origins = ({}, {}) if path is None else _read_file(FilePath(path))
    for override in overrides:
        _apply(override, raw, origins)
    try:
        config = _validated(raw)
        problems = list(contradictions(config))
        said = {problem.path for problem in problems}
        problems += [problem for problem in unbuilt(config) if problem.path not in said]
        if problems:
            raise ConfigError(problems)
        transformer_config(config)
    except ConfigError as error:
        raise ConfigError(error.problems, origins) from None
    warnings = ConfigError(list(idle(config)), origins)
    return Loaded(config, tuple(str(warnings).splitlines()), origins)


def config_text(config: Config) -> str:
    """The configuration as YAML with every key; `load_config` reads it back equal."""
    return dump(config.plain())


def _read_file(path: FilePath) -> tuple[dict[str, Any], dict[Path, str]]:
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or "this is not the name of a file"
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else reason
        raise ConfigError([Problem((), f"{path}: {reason}{_meant(path)}")]) from None
    try:
        document = load(text, str(path))
    except YamlError as error:
        raise ConfigError([Problem((), str(error))]) from None
    if document.value is None:
        return {}, {}
    if not isinstance(document.value, dict):
        raise ConfigError(
            [Problem((), f"{path}:1: a configuration is made of `key: value` lines, and this is not one")]
        )
    return document.value, {where: str(mark) for where, mark in document.marks.items()}


def _meant(path: FilePath) -> str:
    """A hint for ``shardweave train parallel.tensr 2`` and the like."""
    if "=" in str(path):
        return "; an override comes after the configuration file, or without one"
    others = sorted(path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    names = ", ".join(str(other) for other in others[:5])
    return f"; there {'is' if len(others) == 1 else 'are'} {names}" if names else ""


def _apply(override: str, raw: dict[str, Any], origins: dict[Path, str]) -> None:
    """Writes one ``KEY=VALUE`` into `raw`. A block given as a whole changes only the keys it names."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(
            [
                Problem(
                    (),
                    f"`{override}` is not an override; write KEY=VALUE with a dotted key: parallel.tensor=2",
                )
            ]
        )
    try:
        value = load(text, f"{_COMMAND_LINE}: {key}").value
    except YamlError as error:
        raise ConfigError([Problem((), str(error))]) from None
    path: Path = tuple(key.split("."))
    if len(path) == 1 and path[0] in Config.blocks() and isinstance(value, Mapping):
        for name, item in value.items():
            _write((path[0], name), item, raw, origins)
    else:
        _write(path, value, raw, origins)


def _write(path: Path, value: object, raw: dict[str, Any], origins: dict[Path, str]) -> None:
    here = raw
    for depth, part in enumerate(path[:-1], start=1):
        inner = here.setdefault(str(part), {})
        if inner is None:
            inner = here[str(part)] = {}
        if not isinstance(inner, dict):
            problem = unknown_key(path, value) if depth > 1 else None
            text = (
                problem.text if problem else f"{path_text(path[:depth])} is given as a value, not as a block"
            )
            raise ConfigError([Problem((), f"{_COMMAND_LINE}: {text}")])
        here = inner
    here[str(path[-1])] = value
    for where in [where for where in origins if where[: len(path)] == path]:
        del origins[where]
    origins[path] = _COMMAND_LINE


def _validated(raw: dict[str, Any]) -> Config:
    """The schema applied to `raw`, with the preset's values under the model keys that are given."""
    try:
        config = Config.model_validate(raw)
        if config.model.preset is None:
            return config
        given = {key: value for key, value in raw.items() if key != "model"}
        return Config.model_validate(given | {"model": preset_keys(config.model) | raw["model"]})
    except ValidationError as error:
        raise ConfigError(list(explain(error, raw))) from None
