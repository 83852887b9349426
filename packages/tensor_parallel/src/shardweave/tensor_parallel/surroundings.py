"""What the code between split layers has to be told: sizes, arguments and random numbers of a rank.

A module that somebody else wrote knows how many heads the whole model has, takes a bias for all of them, and draws
dropout masks for its attention weights. On a rank there are fewer heads. :func:`resolve_surroundings` checks all
of that while nothing is changed, :meth:`Change.apply` does it, :meth:`Change.undo` takes it back.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from shardweave.comm import Axis, RandomFork, RandomStreams, split_range

from .eager import eager
from .plans import Cut, Plan, matching

__all__ = [
    "AttributeChange",
    "Change",
    "Hook",
    "HookChange",
    "resolve_surroundings",
    "short_cuts",
    "withheld",
]


class Change:
    """Something that is done to a module and can be taken back. Not a change itself."""

    @abstractmethod
    def apply(self, root: nn.Module) -> None:
        """Does it, in the tree below ``root``."""

    @abstractmethod
    def undo(self, root: nn.Module) -> None:
        """Takes it back."""


@dataclass(frozen=True)
class AttributeChange(Change):
    """An attribute that holds another value on a rank."""

    path: str
    name: str
    before: int
    after: int

    def apply(self, root: nn.Module) -> None:
        setattr(root.get_submodule(self.path), self.name, self.after)

    def undo(self, root: nn.Module) -> None:
        setattr(root.get_submodule(self.path), self.name, self.before)


class Hook:
    """Base of the hooks that :func:`parallelize` registers, so that ``gather`` knows them again."""


@dataclass(frozen=True)
class HookChange(Change):
    """A hook that is registered at a module."""

    path: str
    hook: Hook
    register: Callable[[nn.Module, Any], object]
    """Registers the hook at the module."""

    def apply(self, root: nn.Module) -> None:
        self.register(root.get_submodule(self.path), self.hook)

    def undo(self, root: nn.Module) -> None:
        module = root.get_submodule(self.path)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if cast(object, hook) is self.hook]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


@dataclass(frozen=True)
class Withheld(Change):
    """A method that would do harm to a module of slices: it says so instead."""

    path: str
    name: str
    refuse: Callable[..., object]

    def apply(self, root: nn.Module) -> None:
        root.get_submodule(self.path).__dict__.setdefault(self.name, self.refuse)

    def undo(self, root: nn.Module) -> None:
        own = root.get_submodule(self.path).__dict__
        if own.get(self.name) is self.refuse:
            del own[self.name]


class _NoShortCut(Hook):
    """Does nothing: torch's layer takes its short cut past its children only where nobody watches them."""

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        return None


def short_cuts(module: nn.Module, split: Collection[str]) -> list[Change]:
    """In evaluation, torch's transformer layers multiply with their children's weights themselves, which are slices.

    ``split``: paths of the layers that are split.
    """
    changes: list[Change] = []
    for path, part in module.named_modules():
        if not any(inner.startswith(f"{path}." if path else "") for inner in split):
            continue
        if isinstance(part, nn.TransformerEncoderLayer):
            changes.append(HookChange(path, _NoShortCut(), _before))
        elif isinstance(part, nn.TransformerEncoder):  # makes nested tensors, for that short cut only
            changes.append(AttributeChange(path, "use_nested_tensor", part.use_nested_tensor, False))
    return changes


def withheld(module: nn.Module) -> list[Change]:
    """transformers' ``save_pretrained``: every rank would write its slices over those of the others."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            "save_pretrained of a model whose layers are split would save this rank's slices as if they were the whole "
            "model: call shardweave.tensor_parallel.gather(model, axis) first, on all ranks, and save on one"
        )

    name = "save_pretrained"
    return [
        Withheld(path, name, refuse)
        for path, part in module.named_modules()
        if callable(getattr(type(part), name, None))
    ]


@dataclass
class _CutArguments(Hook):
    """Before ``forward``: gives it this rank's part of some arguments."""

    cuts: Mapping[str, Cut]
    positions: Mapping[str, int]
    """Where each of them is among the positional arguments."""
    path: str
    axis: Axis

    def __call__(
        self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = list(given)
        for name, cut in self.cuts.items():
            position = self.positions[name]
            if name in named:
                named = named | {name: self._part(named[name], name, cut)}
            elif position < len(arguments):
                arguments[position] = self._part(arguments[position], name, cut)
        return tuple(arguments), named

    def _part(self, value: Tensor | None, name: str, cut: Cut) -> Tensor | None:
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise ValueError(
                f"argument {name!r} of module {self.path!r} is {value!r}; the plan cuts it, so it has to be a tensor"
            )
        if value.dim() <= cut.dim or value.shape[cut.dim] % cut.size:
            raise ValueError(
                f"argument {name!r} of module {self.path!r} has shape {tuple(value.shape)}; the plan says that "
                f"dimension {cut.dim} consists of blocks of {cut.size}"
            )
        own = split_range(cut.size, self.axis.size, self.axis.rank)
        blocks: Tensor = value.unflatten(cut.dim, (-1, cut.size))
        return blocks.narrow(cut.dim + 1, own.start, len(own)).flatten(cut.dim, cut.dim + 1)


class _SplitRandom:
    """The fork of the random numbers that is open while a module computes its rank's heads."""

    def __init__(self, axis: Axis) -> None:
        self.streams = RandomStreams({"split": (axis,)})
        self.fork: RandomFork | None = None

    def end(self) -> None:
        if self.fork is not None:
            self.fork.end()
            self.fork = None


@dataclass
class _BeginSplit(Hook):
    """Before the module: from here on the ranks draw apart. Only in training: evaluation draws nothing."""

    random: _SplitRandom

    @eager
    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        if module.training:
            self.random.end()
            self.random.fork = self.random.streams.fork("split")


@dataclass
class _EndSplit(Hook):
    """Before the row-parallel layer, and when the module is left in whatever way: they draw alike again."""

    random: _SplitRandom

    @eager
    def __call__(self, module: nn.Module, given: tuple[Any, ...], output: Any = None) -> None:
        self.random.end()


def resolve_surroundings(module: nn.Module, plan: Plan, axis: Axis) -> list[Change]:
    """The changes that the plan asks for beside the layers, checked; nothing is changed yet.

    Raises:
        ValueError: for a pattern without a match, an attribute or argument that does not exist, or a size that the
            ranks do not divide.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    changes: list[Change] = []
    for pattern, values in plan.attributes.items():
        for path in matching(pattern, modules):
            changes += [_attribute(modules[path], path, name, value, axis) for name, value in values.items()]
    for pattern, cuts in plan.arguments.items():
        for path in matching(pattern, modules):
            changes.append(_cut_arguments(modules[path], path, cuts, axis))
    for pattern, last in plan.random.items():
        for path in matching(pattern, modules):
            changes += _split_random(modules[path], path, last, axis)
    return changes


def _attribute(module: nn.Module, path: str, name: str, value: int | str, axis: Axis) -> Change:
    before = getattr(module, name, None)
    if not isinstance(before, int):
        raise ValueError(
            f"the plan sets attribute {name!r} of module {path!r}, which is {before!r} there, not a whole number; "
            "was the plan written for another version of this module?"
        )
    if isinstance(value, int):
        return AttributeChange(path, name, before, value)
    if value != "divide":
        raise ValueError(
            f"attribute {name!r} of module {path!r} is to become {value!r}; give a number or 'divide'"
        )
    if before % axis.size:
        raise ValueError(
            f"attribute {name!r} of module {path!r} is {before}, which the {axis.size} ranks of axis "
            f"{axis.name!r} do not divide"
        )
    return AttributeChange(path, name, before, before // axis.size)


def _cut_arguments(module: nn.Module, path: str, cuts: Mapping[str, Cut], axis: Axis) -> Change:
    names = list(inspect.signature(module.forward).parameters)
    for name, cut in cuts.items():
        if name not in names:
            raise ValueError(
                f"the plan cuts argument {name!r} of module {path!r}, whose forward has {', '.join(names)}; "
                "was the plan written for another version of this module?"
            )
        if cut.size % axis.size:
            raise ValueError(
                f"argument {name!r} of module {path!r} is made of blocks of {cut.size}, which the {axis.size} ranks "
                f"of axis {axis.name!r} do not divide"
            )
    hook = _CutArguments(cuts, {name: names.index(name) for name in cuts}, path, axis)
    return HookChange(path, hook, _before_with_names)


def _split_random(module: nn.Module, path: str, last: str, axis: Axis) -> list[Change]:
    if last not in dict(module.named_modules()):
        raise ValueError(
            f"the plan ends the split of random numbers in module {path!r} at {last!r}: there is none"
        )
    if axis.size == 1:
        return []
    random = _SplitRandom(axis)
    end = f"{path}.{last}" if path else last
    return [
        HookChange(path, _BeginSplit(random), _before),
        HookChange(end, _EndSplit(random), _before),
        HookChange(path, _EndSplit(random), _after_always),
    ]


def _before(module: nn.Module, hook: Any) -> object:
    return module.register_forward_pre_hook(hook)


def _before_with_names(module: nn.Module, hook: Any) -> object:
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _after_always(module: nn.Module, hook: Any) -> object:
    return module.register_forward_hook(hook, always_call=True)
