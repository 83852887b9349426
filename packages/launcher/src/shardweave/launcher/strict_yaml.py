"""YAML without surprises.

PyYAML reads YAML 1.1: ``3e-4`` is text, ``on`` is a boolean, ``12:30:00`` is the number 45000, ``017`` is
fifteen, and of two equal keys the last silently wins. A configuration file that is read like this trains
something other than what it says. Here PyYAML only scans and composes; what a plain scalar *means* follows the
core schema of YAML 1.2 (section 10.3.2), equal keys are refused, and the line and column of every value are
kept, so that an error found much later can still say ``run.yaml:3``.

``dump`` is the other direction: what it writes, ``load`` reads back as the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

__all__ = ["Document", "Mark", "Path", "YamlError", "dump", "load", "path_text"]

Path = tuple[str | int, ...]
"""The way to a value from the top of the document: ``("optimizer", "betas", 0)``."""

MAX_VALUES = 100_000
"""More values than this are refused: a few aliases of aliases can stand for billions ("billion laughs")."""

MAX_DIGITS = 1000
"""Longer numbers are refused: Python reads only some thousand digits, and nothing here needs more."""


class YamlError(ValueError):
    """The text is not YAML that we accept; the message starts with ``file:line:``."""


@dataclass(frozen=True)
class Mark:
    """Where a value was written: ``run.yaml``, line 3, column 9 (both from 1)."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A value made of dict, list, str, int, float, bool and None, and where each part of it was written."""

    value: Any
    marks: Mapping[Path, Mark] = field(default_factory=dict)

    def mark(self, path: Path) -> Mark | None:
        """The mark of the value at `path`, or of the nearest value around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.marks:
                return self.marks[path[:length]]
        return None


def path_text(path: Path) -> str:
    """``("optimizer", "betas", 0)`` as a user writes it: ``optimizer.betas[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _float(text: str) -> float:
    lowered = text.lower().lstrip("+-")
    if lowered == ".inf":
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if lowered == ".nan" else float(text)


# YAML 1.2 core schema: the first expression that matches the whole scalar decides; none means text.
_SCALARS: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = (
    ("null", re.compile(r"null|Null|NULL|~|"), lambda text: None),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    ("int", re.compile(r"[-+]?[0-9]+"), lambda text: int(text, 10)),
    ("int", re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    ("int", re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), _float),
    ("float", re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), _float),
)

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")}


def _kind(text: str) -> str:
    return next((kind for kind, pattern, _ in _SCALARS if pattern.fullmatch(text)), "str")


class _Composer(yaml.SafeLoader):
    """PyYAML's scanner, parser and composer. Its resolver is asked only for collections and the ``!`` tag."""


def _resolve(self: object, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
    if kind is yaml.ScalarNode:
        return _TAG + (_kind(value) if implicit[0] else "str")
    return _TAG + ("seq" if kind is yaml.SequenceNode else "map")


class _Dumper(yaml.SafeDumper):
    """Writes a plain scalar only where `load` reads the same value back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Composer.resolve = _resolve  # type: ignore[method-assign]
_Dumper.resolve = _resolve  # type: ignore[method-assign]
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence(_TAG + "seq", items, flow_style=True)
)


class _Reader:
    """Turns composed nodes into values; one instance reads one document."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.marks: dict[Path, Mark] = {}
        self.num_values = 0
        self.open_nodes: set[int] = set()  # the collections around the value being read

    def error(self, node: yaml.Node, message: str) -> YamlError:
        return YamlError(f"{self.mark(node)}: {message}")

    def mark(self, node: yaml.Node) -> Mark:
        return Mark(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.error(node, f"more than {MAX_VALUES} values (aliases counted each time they are used)")
        if node.tag not in _PLAIN_TAGS:
            raise self.error(node, f"the tag {node.tag} is not accepted; write a plain value")
        self.marks[path] = self.mark(node)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if id(node) in self.open_nodes:
            raise self.error(node, "an alias refers to the collection it stands in")
        self.open_nodes.add(id(node))
        value = (
            self.mapping(node, path)
            if isinstance(node, yaml.MappingNode)
            else [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        )
        self.open_nodes.discard(id(node))
        return value

    def scalar(self, node: yaml.ScalarNode) -> Any:
        wanted = node.tag.removeprefix(_TAG)
        if wanted == "str":
            return node.value
        for kind, pattern, convert in _SCALARS:
            if pattern.fullmatch(node.value) and (kind == wanted or (kind, wanted) == ("int", "float")):
                if len(node.value) > MAX_DIGITS:
                    raise self.error(node, f"a number of {len(node.value)} characters")
                value = convert(node.value)
                return float(value) if wanted == "float" else value
        raise self.error(node, f"`{node.value}` is not a {wanted}, as its tag says")

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        value: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.error(key_node, "a key must be a word, not a collection")
            key = str(key_node.value)
            if key in value:
                raise self.error(
                    key_node,
                    f"`{path_text((*path, key))}` is given twice (first in line {lines[key]}); keep one of them",
                )
            lines[key] = key_node.start_mark.line + 1
            value[key] = self.read(value_node, (*path, key))
            # A block's value starts a line below its key: an error about a setting points at the key.
            self.marks[(*path, key)] = self.mark(key_node)
        return value


def load(text: str | bytes, source: str) -> Document:
    """Reads one YAML document.

    `source` is the name that errors and marks carry. An empty text is None. Raises `YamlError` for anything that
    is not YAML, for equal keys, tags, several documents, and aliases that contain themselves or explode.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        composer = _Composer(text)
        try:
            node = composer.get_single_node()
        finally:
            composer.dispose()
        if node is None:
            return Document(None)
        reader = _Reader(source)
        return Document(reader.read(node, ()), reader.marks)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise YamlError(f"{source}:{line}: not UTF-8 text: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = (error.problem or "not YAML").replace("\n", " ")
        if "\\t" in problem:
            problem += "; indent with spaces, not tabs"
        raise YamlError(f"{where}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1 if isinstance(text, str) else 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise YamlError(f"{source}:{line}: not valid YAML: the character U+{code:04X} is not text") from None
    except yaml.YAMLError as error:
        raise YamlError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise YamlError(f"{source}: nested too deeply") from None


def dump(value: Any) -> str:
    """Writes a value of dict, list, str, int, float, bool and None so that `load` gives it back equal.

    Mappings are written a key a line in their own order, lists on one line.
    """
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=110
    )
