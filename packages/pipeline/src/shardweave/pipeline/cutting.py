"""From a model to the modules of pipeline stages.

A stage is a module that takes what the stage before it returned. Models are seldom written that way: an embedding
takes tokens, layers take masks and positions besides, and a forward of the whole goes through all of it. So a model is
first described as pieces in order, each with the submodules it consists of and how they are called. Then any run of
pieces is a stage::

    model    transformer.wte, wpe | transformer.h.0 | transformer.h.1 | transformer.ln_f, lm_head
    pieces   embed                | block           | block           | head
    stages   0: [0, 2)                              | 1: [2, 4)

A stage keeps the submodules under the names they have in the model, so that its ``state_dict`` is a part of the
model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from .public_pieces import PUBLIC

__all__ = ["Cuttable", "Model", "Piece", "StageModule", "cut", "pieces_of", "shared_parameters"]


@dataclass(frozen=True)
class Piece:
    """Something that a stage consists of: an embedding, a layer, a head."""

    paths: tuple[str, ...]
    """The names of its submodules in the model, as ``get_submodule`` takes them. A submodule without parameters (rotary
    positions, say) may be in several pieces; one with parameters that is in several is shared by their stages."""
    run: Callable[..., Any] | None = None
    """Called with the submodules in the order of ``paths``, then with what the piece before returned (a tensor, or
    the tensors of a tuple), then with those keywords of the step that it names. ``None``: the only submodule is
    called."""


@runtime_checkable
class Cuttable(Protocol):
    """A model that says how it can be cut."""

    def pieces(self) -> Sequence[Piece]:
        """Its pieces in the order of the forward pass."""


Model: TypeAlias = nn.Module | Sequence[nn.Module]


def pieces_of(model: Model) -> list[Piece]:
    """The pieces of a model in the order of the forward pass: what a partition cuts, and has costs for.

    - a list of modules, an ``nn.ModuleList`` or an ``nn.Sequential``: each of them is a piece;
    - a model with a method ``pieces()``: what that returns, a list of :class:`Piece`;
    - GPT-2 and Llama for causal language modelling of transformers, by ``model.config.model_type``: embedding, layers,
      and final norm with head. Stage 0 takes ``input_ids``, the last stage returns logits. Attention is causal over
      the whole sequence, unless ``attention_mask`` is given as the layers take it, with four dims; ``position_ids``
      may be given, too.

    Raises:
        ValueError: a model of another kind, or one of transformers with an option that its pieces do not know.
    """
    if isinstance(model, Cuttable):
        return list(model.pieces())
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [Piece((name,)) for name in _children(model)]
    if not isinstance(model, nn.Module):
        return [Piece((str(index),)) for index in range(len(model))]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in PUBLIC:
        return [Piece(paths, run) for paths, run in PUBLIC[kind](model)]
    raise ValueError(
        f"no way is known to cut a {type(model).__name__}; give a list of modules or an nn.Sequential, or the model a "
        f"method pieces() that returns Piece objects; of transformers are known the model_types {', '.join(PUBLIC)}"
    )


def cut(model: Model, ranges: Sequence[range]) -> list[StageModule]:
    """The stages of a model: stage s has the pieces ``ranges[s]`` of :func:`pieces_of`.

    The stages hold the model's own submodules, not copies. A rank keeps those of its stages and lets go of the
    model and of the others; a model that is too large for that is built on the meta device first.

    Args:
        model: see :func:`pieces_of`.
        ranges: from ``partition``, over the pieces.

    Raises:
        ValueError: ``ranges`` leave out a piece or repeat one, or a parameter belongs to no piece.
    """
    pieces = pieces_of(model)
    covered = [index for its in ranges for index in its]
    if covered != list(range(len(pieces))):
        raise ValueError(
            f"cut: the stages {[(its.start, its.stop) for its in ranges]} do not have each of the {len(pieces)} "
            "pieces once and in order; partition() over as many costs gives ranges that do"
        )
    root = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    known = _Keywords.of(root, pieces)
    _check_all_owned(root, pieces)
    return [StageModule(root, [pieces[index] for index in its], known) for its in ranges]


def shared_parameters(
    stages: Sequence[nn.Module], held: Collection[int]
) -> dict[str, dict[int, nn.Parameter | None]]:
    """The parameters that several stages share, as :func:`tie_all` takes them.

    Every rank calls it on the stages of the whole model, from :func:`cut`, before it lets go of any.

    Args:
        stages: of the whole model, in order.
        held: the stages that this rank keeps: ``plan.stages_of(axis.rank)``.

    Returns:
        By the parameter's name in the first stage that has it: per stage that has it, the parameter on the ranks that
        hold the stage, else ``None``.
    """
    names: dict[int, str] = {}
    found: dict[int, dict[int, nn.Parameter]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            names.setdefault(id(parameter), name)
            found.setdefault(id(parameter), {})[index] = parameter
    return {
        names[key]: {index: parameter if index in held else None for index, parameter in places.items()}
        for key, places in found.items()
        if len(places) > 1
    }


class StageModule(nn.Module):
    """Some pieces of a model, one after the other: what a pipeline runs as one stage.

    It takes a tensor or several, returns what its last piece returns, and passes each keyword to those pieces that
    name it.
    """

    def __init__(self, root: nn.Module, pieces: Sequence[Piece], known: _Keywords) -> None:
        super().__init__()
        self._pieces = tuple(pieces)
        self._known = known
        for piece in pieces:
            for path in piece.paths:
                _place(self, path, root.get_submodule(path))

    def forward(self, *values: Any, **keywords: Any) -> Any:
        """Through all pieces."""
        self._known.check(keywords)
        value: Any = values
        for piece in self._pieces:
            submodules = [self.get_submodule(path) for path in piece.paths]
            given = value if isinstance(value, tuple) else (value,)
            its = self._known.of_piece(piece, keywords)
            if piece.run is None:
                (submodule,) = submodules
                value = submodule(*given, **its)
            else:
                value = piece.run(*submodules, *given, **its)
        return value

    def extra_repr(self) -> str:
        """How many pieces there are."""
        return f"{len(self._pieces)} pieces"


class _Keywords:
    """Which keywords of a step each piece takes."""

    def __init__(self, names: Mapping[Piece, frozenset[str] | None]) -> None:
        self._names = names
        taken = [its for its in names.values() if its is not None]
        # Of all pieces; None: one of them takes any. Every call of a stage asks.
        self._everything = frozenset[str]().union(*taken) if len(taken) == len(names) else None

    @classmethod
    def of(cls, root: nn.Module, pieces: Iterable[Piece]) -> _Keywords:
        return cls({piece: _named(root, piece) for piece in pieces})

    def check(self, keywords: Mapping[str, Any]) -> None:
        """Raises ValueError for a keyword that no piece of the model takes."""
        if self._everything is None:
            return
        unknown = sorted(set(keywords) - self._everything)
        if unknown:
            raise ValueError(
                f"no piece of the model takes {', '.join(map(repr, unknown))}; its pieces take "
                f"{sorted(self._everything)}"
            )

    def of_piece(self, piece: Piece, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Those that the piece takes."""
        names = self._names[piece]
        return {name: value for name, value in keywords.items() if names is None or name in names}


def _named(root: nn.Module, piece: Piece) -> frozenset[str] | None:
    """The keywords a piece takes; ``None``: any."""
    function = piece.run
    if function is None:
        if len(piece.paths) != 1:
            raise ValueError(
                f"piece {piece.paths} has no function and not one submodule; give it run= or one path"
            )
        function = root.get_submodule(piece.paths[0]).forward
    parameters = inspect.signature(function).parameters.values()
    if any(its.kind is inspect.Parameter.VAR_KEYWORD for its in parameters):
        return None
    return frozenset(
        its.name
        for its in parameters
        if its.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )


def _children(model: nn.Module) -> list[str]:
    """The names of direct submodules, also of one that is there twice."""
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]


def _place(stage: nn.Module, path: str, module: nn.Module) -> None:
    """Registers ``module`` under the name it has in the model, with plain modules for the names on the way."""
    *way, last = path.split(".")
    place = stage
    for name in way:
        if name not in dict(place.named_children()):
            place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    place.add_module(last, module)


def _check_all_owned(root: nn.Module, pieces: Sequence[Piece]) -> None:
    owned: set[int] = set()
    for piece in pieces:
        for path in piece.paths:
            owned |= _tensors(root.get_submodule(path)).keys()
    left = [name for key, name in _tensors(root).items() if key not in owned]
    if left:
        raise ValueError(
            f"cut: {left[0]} belongs to no piece ({len(left)} parameters and buffers in all do not); name the "
            "submodules that hold them in a piece's paths"
        )


def _tensors(module: nn.Module) -> dict[int, str]:
    """Parameters and saved buffers, by identity."""
    saved: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return {id(tensor): name for name, tensor in saved.items()}
