"""Which module of a tree is split how: a plan of name patterns, resolved before anything is touched.

Every mistake in a plan (a pattern that fits nothing, a layer of the wrong kind, two patterns that disagree, a
tied weight of which only one user is split) is found here, while the module is still whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["Style", "parse_style", "resolve"]

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "column_gather": (nn.Linear,),
    "row": (nn.Linear,),
    "vocab": (nn.Embedding,),
    "sequence": (),
}
"""What each style may be applied to; nothing listed means any module."""

_SPLIT_DIM = {"column": 0, "column_gather": 0, "vocab": 0, "row": 1}


@dataclass(frozen=True)
class Style:
    """How one module is split, as written in a plan: ``column``, ``column:3``, ``row``, ..."""

    kind: str
    """``column``, ``column_gather``, ``row``, ``vocab`` or ``sequence``."""
    blocks: int = 1
    """Equal blocks that a fused matrix consists of, each of which is split (``column:3`` for [q; k; v])."""

    def __str__(self) -> str:
        return self.kind if self.blocks == 1 else f"{self.kind}:{self.blocks}"

    @property
    def split_dim(self) -> int | None:
        """The weight's dimension that is split, ``None`` when it stays whole."""
        return _SPLIT_DIM.get(self.kind)


def parse_style(text: str) -> Style:
    """Reads the text form of a :class:`Style`.

    Raises:
        ValueError: for a style that does not exist.
    """
    kind, colon, number = text.partition(":")
    if kind not in _KINDS or (colon and (kind != "column" or not number.isdigit() or int(number) < 1)):
        raise ValueError(
            f"style {text!r} does not exist; use one of {', '.join(_KINDS)}, "
            "or column:N for a matrix of N fused blocks"
        )
    return Style(kind, int(number) if colon else 1)


def resolve(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """The style of every module path that the plan names, checked.

    A pattern is a path such as ``layers.*.fc1``; ``*`` and ``?`` match within one component, ``**`` any
    number of components. The empty pattern is the module itself.

    Raises:
        ValueError: see the module's docstring; the message names pattern, path and the way out.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    chosen: dict[str, tuple[str, Style]] = {}
    for pattern, text in plan.items():
        style = parse_style(text)
        paths = [path for path in modules if _matches(_components(path), _components(pattern))]
        if not paths:
            raise ValueError(_no_match(pattern, modules))
        for path in paths:
            _check_kind(path, modules[path], style)
            earlier = chosen.setdefault(path, (pattern, style))
            if earlier[1] != style:
                raise ValueError(
                    f"module {path!r} is {earlier[1]} by pattern {earlier[0]!r} and {style} by {pattern!r}; "
                    "make one of them narrower"
                )
    styles = {path: style for path, (_, style) in chosen.items()}
    _check_ties(module, modules, styles)
    return styles


def _check_kind(path: str, module: nn.Module, style: Style) -> None:
    kinds = _KINDS[style.kind]
    if kinds and type(module) not in kinds:  # exactly: a subclass computes something else
        raise ValueError(
            f"module {path!r} is a {type(module).__name__}; {style} splits {kinds[0].__name__} "
            "(not a subclass or a parametrized one)"
        )
    if isinstance(module, nn.Linear) and module.out_features % style.blocks:
        raise ValueError(
            f"module {path!r} has {module.out_features} output features, not {style.blocks} equal blocks"
        )
    if isinstance(module, nn.Embedding) and style.kind == "vocab":
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ValueError(
                    f"embedding {path!r} has {option}={getattr(module, option)}, which a split table does not "
                    "have; turn it off or leave the embedding whole"
                )


def _check_ties(module: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    """Every name of a parameter that is split has to be split, along the same dimension."""
    users: dict[int, list[tuple[str, str]]] = {}
    for path, owner in modules.items():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((path, name))
    for shared in users.values():
        layouts = {}
        for path, name in shared:
            style = styles.get(path, Style("sequence"))  # stays whole, too
            dim = None if style.split_dim == 1 and name == "bias" else style.split_dim
            layouts[f"{path}.{name}"] = (
                dim,
                style.blocks,
                str(style) if path in styles else "not in the plan",
            )
        if len({layout[:2] for layout in layouts.values()}) > 1:
            uses = ", ".join(f"{name} ({layout[2]})" for name, layout in layouts.items())
            raise ValueError(f"one parameter has several names that would be split differently: {uses}")
        if len({path for path, _ in shared}) > 1 and any(blocks > 1 for _, blocks, _ in layouts.values()):
            raise ValueError(
                f"a matrix of fused blocks becomes several parameters and cannot be tied: {', '.join(layouts)}"
            )


def _no_match(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    kinds = (nn.Linear, nn.Embedding)
    layers = [path for path, module in modules.items() if isinstance(module, kinds)]
    near = get_close_matches(pattern, [path for path in modules if path], n=3, cutoff=0.4) or layers[:5]
    hint = f"; there are, for example: {', '.join(near)}" if near else ""
    return f"pattern {pattern!r} matches no module{hint}"


def _components(path: str) -> list[str]:
    return path.split(".") if path else []


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (bool(path) and _matches(path[1:], pattern))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
