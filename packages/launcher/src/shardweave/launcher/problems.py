"""What is wrong with a configuration, said so that the next edit is obvious.

pydantic knows *that* a value is not allowed. A person needs the path, the value, the rule and the way out, and for
a key that does not exist the one they meant: a misspelt neighbour, an abbreviation, or a right key that stands in
the wrong block. This module turns pydantic's findings into such sentences; other modules make their own
`Problem`s. A `ConfigError` carries all of them at once.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shardweave.launcher.config import Config, WeightedSource
from shardweave.launcher.strict_yaml import Path, YamlError, load, path_text

__all__ = ["ConfigError", "Problem", "alternatives", "divisors", "explain", "quoted", "unknown_key"]

# What people call these elsewhere. Only used to guess what an unknown key means.
_ABBREVIATIONS = {
    "dp": ("parallel", "data"),
    "tp": ("parallel", "tensor"),
    "pp": ("parallel", "pipeline"),
    "cp": ("parallel", "context"),
    "ep": ("parallel", "expert"),
    "sequence_parallel": ("parallel", "sequence"),
    "micro_batch": ("batch", "micro"),
    "micro_batch_size": ("batch", "micro"),
    "batch_size": ("batch", "global"),
    "global_batch_size": ("batch", "global"),
    "learning_rate": ("optimizer", "lr"),
    "grad_clip": ("optimizer", "clip"),
    "clip_grad": ("optimizer", "clip"),
    "max_steps": ("run", "steps"),
    "seq_len": ("model", "sequence"),
    "vocab_size": ("model", "vocab"),
    "hidden_size": ("model", "hidden"),
    "num_layers": ("model", "layers"),
    "num_heads": ("model", "heads"),
    "dtype": ("precision",),
}

# pydantic's error types in words. "{given}" is filled in by `explain`.
_REQUIREMENTS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "string_unicode": "text without broken characters",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong: the path it is about, and a sentence that stands alone."""

    path: Path
    text: str


class ConfigError(ValueError):
    """A configuration that cannot be run. Its text is for the user: one line per problem."""

    def __init__(self, problems: Sequence[Problem], origins: Mapping[Path, str] | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(_place(problem.path, origins or {}) + problem.text for problem in problems)
        )


def _place(path: Path, origins: Mapping[Path, str]) -> str:
    """``run.yaml:3: `` of the value at `path`, or of the nearest thing around it or in it."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f"{origins[path[:length]]}: "
    inside = [origin for where, origin in origins.items() if path and where[: len(path)] == path]
    return f"{inside[0]}: " if inside else ""


def divisors(number: int, near: int = 1, most: int = 12) -> list[int]:
    """The divisors of a number, in order; of many only those closest to `near`."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    found = {*small, *(number // candidate for candidate in small)}
    return sorted(sorted(found, key=lambda divisor: (abs(divisor - near), divisor))[:most])


def _scalar(text: str) -> object:
    """What a YAML reader makes of this text."""
    try:
        return load(text, "value").value
    except YamlError:
        return text


def quoted(value: object) -> str:
    """A value as it would be written in YAML, short enough for a sentence."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {quoted(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(quoted(item) for item in value) + "]"
    else:
        text = str(value)
        if isinstance(value, str) and not (
            value.strip() and value.isprintable() and isinstance(_scalar(value), str)
        ):
            text = json.dumps(value, ensure_ascii=False) if value.isprintable() else ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def alternatives(words: Sequence[object], conjunction: str = "or") -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {conjunction} {texts[-1]}"


def _keys_at(block: Path) -> tuple[str, ...]:
    """The keys that may stand in a block; none where no block can be."""
    blocks = Config.blocks()
    if not block:
        return Config.key_names()
    if block[:2] == ("data", "source") and len(block) == 3:
        return WeightedSource.key_names()
    return blocks[str(block[0])].key_names() if len(block) == 1 and block[0] in blocks else ()


def unknown_key(path: Path, value: object) -> Problem:
    """The problem of a key that does not exist, with the key that was probably meant."""
    block, name = path[:-1], str(path[-1])
    siblings = _keys_at(block)
    elsewhere = [
        path_text((other, name)) for other, schema in Config.blocks().items() if name in schema.key_names()
    ]
    if block and name in Config.key_names():
        elsewhere.append(name)
    close = difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.8)
    nearest = _nearest(block, name, siblings)
    if not siblings:
        hint = f"`{path_text(block)}` is a value, not a block of keys"
    elif close:
        hint = f"did you mean `{path_text((*block, close[0]))}`?"
    elif elsewhere:
        hint = f"this key belongs elsewhere: write {alternatives([f'`{there}`' for there in elsewhere])}"
    elif "." in name and not block:
        outer, _, inner = name.partition(".")
        hint = (
            f"dotted keys are for the command line; in a file write `{outer}: {{{inner}: {quoted(value)}}}`"
        )
    else:
        hint = f"the nearest key is `{path_text(nearest)}`" if nearest else "it is like none that there is"
        hint += f" (keys here: {', '.join(siblings)})"
    return Problem(path, f"{path_text(path)}: there is no such key (its value is {quoted(value)}); {hint}")


def _nearest(block: Path, name: str, siblings: Sequence[str]) -> Path | None:
    """The most similar key, of this block or of the abbreviations people use; None if none has a letter of it."""
    candidates: dict[str, Path] = dict(_ABBREVIATIONS) | {key: (*block, key) for key in siblings}
    alike = {word: difflib.SequenceMatcher(None, name.lower(), word).ratio() for word in candidates}
    best = max(alike, key=lambda word: alike[word])
    return candidates[best] if alike[best] > 0 else None


def _requirement(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        words = {
            "greater_than_equal": "at least",
            "greater_than": "more than",
            "less_than_equal": "at most",
            "less_than": "less than",
        }
        limit = next(iter(context.values()))
        return f"{words[kind]} {limit:g}" if isinstance(limit, float) else f"{words[kind]} {limit}"
    if kind == "missing" and isinstance(error["loc"][-1], int):
        return f"a list of at least {error['loc'][-1] + 1} values"
    if kind in ("too_long", "too_short", "missing"):
        length = context.get("max_length", context.get("min_length"))
        return (
            f"a list of {length} values"
            if length is not None
            else f"a block with the key `{error['loc'][-1]}`"
        )
    return _REQUIREMENTS.get(kind, str(error["msg"]))


def _true_path(loc: Sequence[str | int], data: object) -> Path:
    """pydantic's location without the names of union members that it puts in between."""
    path: list[str | int] = []
    here = data
    for part in loc:
        is_key = isinstance(here, Mapping) and part in here
        is_item = isinstance(part, int) and isinstance(here, (list, tuple)) and part < len(here)
        if is_key or is_item:
            here = here[part]  # type: ignore[index]  # one of the two, as just asked
            path.append(part)
    return tuple(path)


def explain(error: ValidationError, data: object) -> Iterator[Problem]:
    """The problems behind a validation error of `Config`; `data` is what was validated.

    The findings about one value (a union reports one for each member) become one sentence.
    """
    groups: dict[Path, list[Mapping[str, Any]]] = {}
    for finding in error.errors(include_url=False):
        groups.setdefault(_true_path(finding["loc"], data), []).append(finding)
    for path, findings in groups.items():
        if any(len(other) > len(path) and other[: len(path)] == path for other in groups):
            continue  # one of a union's other members, or the block around a key that is itself reported
        extra = [finding for finding in findings if finding["type"] == "extra_forbidden"]
        if extra:
            yield unknown_key(path, extra[0]["input"])
            continue
        value = findings[0]["input"]
        rules = list(dict.fromkeys(_requirement(finding) for finding in findings))
        if path == ("recompute",) and findings[0]["type"] == "literal_error":
            rules = ["none", "selective", "full", "{every: N}", "{operations: [...]}"]
        if "a block of keys" in rules and len(rules) > 1:
            rules.remove("a block of keys")
        text = f"{path_text(path) or 'the file'}: {quoted(value)} is not allowed; it must be {alternatives(rules)}"
        words = [word for rule in rules for word in rule.replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
        if close:
            text += f". Did you mean `{close[0]}`?"
        elif type(value) in (int, float) and rules[:1] == ["text"]:
            text += f': put it in quotes, "{value}"'
        yield Problem(path, text)
