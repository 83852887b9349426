"""Which module of a tree is split how: a plan of name patterns, resolved before anything is touched.

Every mistake in a plan (a pattern that fits nothing, a layer of the wrong kind, two patterns that disagree, a
tied weight of which only one user is split) is found here, while the module is still whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from .conv1d import features_of, is_conv1d
from .layer import ParallelLayer

__all__ = ["Cut", "Plan", "Style", "matching", "parse_style", "resolve"]

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "column_heads": (nn.Linear,),
    "column_gather": (nn.Linear,),
    "row": (nn.Linear,),
    "row_heads": (nn.Linear,),
    "vocab": (nn.Embedding,),
    "sequence": (),
    "partial": (),
}
"""What each style may be applied to; nothing listed means any module. Where a Linear may be, a Conv1D may."""

_HEADS = ("column_heads", "row_heads")


@dataclass(frozen=True)
class Cut:
    """An argument of which a rank gets a part: its dimension ``dim`` is made of blocks of ``size`` entries.

    Each block is split over the axis. With two samples of 4 heads, flat in one dimension, on two ranks::

        argument   [ a0 a1 a2 a3 | b0 b1 b2 b3 ]
        rank 0     [ a0 a1       | b0 b1       ]        Cut(dim=0, size=4)
        rank 1     [       a2 a3 |       b2 b3 ]
    """

    dim: int
    """The dimension, from 0."""
    size: int
    """Entries of one block, which the number of ranks has to divide: the number of heads, say."""

    def __post_init__(self) -> None:
        if self.dim < 0 or self.size < 1:
            raise ValueError(f"{self}: a dimension counted from the front, and blocks of one entry or more")


@dataclass(frozen=True)
class Plan:
    """How a module that somebody else wrote is split: the layers, and what the code between them has to know.

    Every key is a pattern of module names, as :func:`~shardweave.tensor_parallel.parallelize` has them. A mapping
    of styles alone is enough where the code between the layers takes its sizes from its tensors.
    """

    styles: Mapping[str, str]
    """The style of each layer that is split."""
    attributes: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    """Attributes with sizes of the whole, such as a number of heads, and what they are to be on a rank: a number,
    or ``"divide"`` for a part of what they are."""
    arguments: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)
    """Arguments of ``forward`` that are made for the whole, such as a bias for all heads, and how they are cut."""
    random: Mapping[str, str] = field(default_factory=dict)
    """Modules whose random numbers (dropout of attention weights) differ between ranks, and the child with whose
    call that ends: the row-parallel layer, after which all ranks compute the same."""

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("styles", str, "{'layers.*.fc1': 'column', 'layers.*.fc2': 'row'}"),
            ("attributes", Mapping, "{'layers.*.attention': {'num_heads': 'divide'}}"),
            ("arguments", Mapping, "{'layers.*.attention': {'alibi': Cut(dim=0, size=8)}}"),
            ("random", str, "{'layers.*.attention': 'output'}"),
        ):
            given: object = getattr(self, name)
            if not isinstance(given, Mapping):
                raise ValueError(
                    f"{name} of a plan are a {type(given).__name__}, {given!r}: give a mapping of patterns, such as "
                    f"{example}"
                )
            for pattern, value in given.items():
                if not isinstance(pattern, str) or not isinstance(value, kind):
                    raise ValueError(
                        f"{name} of a plan have {pattern!r}: {value!r}: patterns are text and what they stand for is "
                        f"{'text' if kind is str else 'a mapping'}, such as {example}"
                    )
        for pattern, cuts in self.arguments.items():
            for name, cut in cuts.items():
                if not isinstance(cut, Cut):
                    raise ValueError(
                        f"argument {name!r} of {pattern!r} is to be cut by {cut!r}: give a Cut(dim, size)"
                    )


@dataclass(frozen=True)
class Style:
    """How one module is split, as written in a plan: ``column``, ``column:3``, ``row``, ..."""

    kind: str
    """``column``, ``column_heads``, ``column_gather``, ``row``, ``row_heads``, ``vocab``, ``sequence``, ``partial``."""
    blocks: int = 1
    """Equal blocks that a fused matrix consists of, each of which is split (``column:3`` for [q; k; v])."""
    unit: int = 1
    """Neighbouring features that stay together (``column_heads:64``: heads of 64 features)."""

    def __str__(self) -> str:
        if self.kind in _HEADS:
            return f"{self.kind}:{self.unit}"
        return self.kind if self.blocks == 1 else f"{self.kind}:{self.blocks}"

    @property
    def is_column(self) -> bool:
        """Whether output features of a linear layer are split."""
        return self.kind in ("column", "column_heads", "column_gather")

    @property
    def is_mark(self) -> bool:
        """Whether nothing is split: the module's gradients are marked as partial."""
        return self.kind in ("sequence", "partial")

    @property
    def is_row(self) -> bool:
        """Whether input features of a linear layer are split."""
        return self.kind in ("row", "row_heads")

    def split_dim(self, module: nn.Module, name: str) -> int | None:
        """The dimension of the module's parameter ``name`` that is split, ``None`` when it stays whole."""
        if self.kind == "vocab":
            return 0
        if self.is_column:
            return 1 if name == "weight" and is_conv1d(module) else 0
        if self.is_row and name != "bias":
            return 0 if is_conv1d(module) else 1
        return None


def parse_style(text: str) -> Style:
    """Reads the text form of a :class:`Style`.

    Raises:
        ValueError: for a style that does not exist.
    """
    kind, colon, number = text.partition(":")
    counted = kind in _HEADS or (kind == "column" and bool(colon))
    if kind not in _KINDS or (bool(colon) != counted) or (counted and not _is_count(number)):
        raise ValueError(
            f"style {text!r} does not exist; use one of {', '.join(kind for kind in _KINDS if kind not in _HEADS)}, "
            "column:N for a matrix of N fused blocks, or column_heads:D and row_heads:D for heads of D features"
        )
    if kind in _HEADS:
        return Style(kind, unit=int(number))
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
        for path in matching(pattern, modules):
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


def matching(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths that a pattern means.

    Raises:
        ValueError: when there are none.
    """
    paths = [path for path in modules if _matches(_components(path), _components(pattern))]
    if not paths:
        raise ValueError(_no_match(pattern, modules))
    return paths


def _check_kind(path: str, module: nn.Module, style: Style) -> None:
    kinds = _KINDS[style.kind]
    if kinds and isinstance(module, ParallelLayer):
        raise ValueError(
            f"module {path!r} is split already (a {type(module).__name__}), so {style} cannot split it; name "
            "every layer in one plan, or call gather(module, axis) first"
        )
    linear = style.is_column or style.is_row
    # Exactly that type: a subclass computes something else.
    if kinds and type(module) not in kinds and not (linear and is_conv1d(module)):
        raise ValueError(
            f"module {path!r} is a {type(module).__name__}; {style} splits {kinds[0].__name__} "
            "(not a subclass or a parametrized one)"
        )
    if linear:
        inputs, outputs = features_of(module)
        if outputs % style.blocks:
            raise ValueError(
                f"module {path!r} has {outputs} output features, not {style.blocks} equal blocks"
            )
        size, side = (outputs, "output") if style.is_column else (inputs, "input")
        if size % style.unit:
            raise ValueError(f"module {path!r} has {size} {side} features, not heads of {style.unit}")
    if isinstance(module, nn.Embedding) and style.kind == "vocab":
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ValueError(
                    f"embedding {path!r} has {option}={getattr(module, option)}, which a split table does not "
                    "have; turn it off or leave the embedding whole"
                )


def _check_ties(module: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    """Every name of a parameter that is split has to be split, along the same dimension."""
    users: dict[int, list[tuple[str, str]]] = {}  # parameter: where it is and what it is called there
    for path, owner in modules.items():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((path, name))
    for shared in users.values():
        layouts, uses = set(), {}
        for path, name in shared:
            style = styles.get(path, Style("sequence"))  # stays whole, too
            dim = style.split_dim(modules[path], name)
            layouts.add((dim, style.blocks, style.unit if dim is not None else 1))
            uses[f"{path}.{name}"] = str(style) if path in styles else "not in the plan"
        if len(layouts) > 1:
            listed = ", ".join(f"{name} ({style})" for name, style in uses.items())
            raise ValueError(f"one parameter has several names that would be split differently: {listed}")
        if len({path for path, _ in shared}) > 1 and any(blocks > 1 for _, blocks, _ in layouts):
            raise ValueError(
                f"a matrix of fused blocks becomes several parameters and cannot be tied: {', '.join(uses)}"
            )


def _no_match(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    kinds = (nn.Linear, nn.Embedding)
    layers = [path for path, module in modules.items() if isinstance(module, kinds) or is_conv1d(module)]
    near = get_close_matches(pattern, [path for path in modules if path], n=3, cutoff=0.4) or layers[:5]
    hint = f"; there are, for example: {', '.join(near)}" if near else ""
    return f"pattern {pattern!r} matches no module{hint}"


def _is_count(text: str) -> bool:
    return text.isdigit() and int(text) > 0


def _components(path: str) -> list[str]:
    return path.split(".") if path else []


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (bool(path) and _matches(path[1:], pattern))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
