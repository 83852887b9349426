"""Tensor parallelism for a module that somebody else wrote.

The module is built as always, whole, with the same weights on every rank. A plan says which of its layers are
split, by name; they are replaced by layers that hold this rank's slices of those very weights. Nothing is
drawn anew, so the result computes what the module computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, all_reduce, sharding_of

from .asking import check_axes, check_sequence_dim
from .conv1d import features_of
from .features import split_heads
from .origins import TreeOrigin, keep_trees, tree_origins
from .overlap import Overlap
from .plans import Plan, Style, resolve
from .public_plans import plan_for
from .replicas import mark_partial
from .splitting import LayerOptions, split_layer
from .surroundings import resolve_surroundings, short_cuts, withheld

__all__ = ["parallelize"]


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str] | Plan | Literal["auto"],
    axis: Axis,
    *,
    sequence_dim: int | None = None,
    keep_inputs: bool = False,
    decomposed: bool | Overlap = False,
    check: bool = True,
) -> nn.Module:
    """Splits layers of ``module`` over ``axis``, in place, and returns it; :func:`gather` puts it together again.

    ``plan`` maps name patterns to styles, such as ``{"layers.*.fc1": "column", "layers.*.fc2": "row"}``; ``*``
    stands for one component of a name, ``**`` for any number. ``"auto"`` is the plan for a model of transformers
    that :func:`plan_for` knows. A :class:`Plan` says more than styles.

    ==================  ============  ========================================================================
    style               replaces      by
    ==================  ============  ========================================================================
    ``column``          nn.Linear     :class:`ColumnParallelLinear`: output features split
    ``column:N``        nn.Linear     the same for a matrix of N fused blocks (``[q; k; v]``: 3), each split;
                                      the output is this rank's part of each block. Its parameters become
                                      separate ones (``qkv.0.weight``, ...)
    ``column_heads:D``  nn.Linear     output features split between heads of D features; where there are fewer
                                      heads than ranks, several ranks hold the same head
    ``column_gather``   nn.Linear     output features split in memory, all of them returned
    ``row``             nn.Linear     :class:`RowParallelLinear`: input features split
    ``row_heads:D``     nn.Linear     input features split between heads of D features, equally many to a rank
    ``vocab``           nn.Embedding  :class:`VocabParallelEmbedding`: rows split
    ``sequence``        (any module)  nothing: marks its parameters' gradients as partial, for norms between
                                      the pairs under sequence parallelism
    ``partial``         (any module)  nothing: the same for norms of heads, of which each rank has its own
    ==================  ============  ========================================================================

    transformers' ``Conv1D``, a linear layer with its weight the other way round, may stand wherever ``nn.Linear``
    stands; its weight keeps its orientation (except under ``column:N``) and its gradient cannot be deferred.

    Parameters stay the same objects with smaller data (except under ``column:N``): ties and ``requires_grad`` keep
    working; an optimizer is built afterwards. Code between the layers has to take sizes from its tensors, since there
    are fewer features (heads) on a rank, or the :class:`Plan` has to say what it reads instead. ``sequence_dim`` is
    given to all replaced layers, ``keep_inputs`` to the column-parallel ones, ``decomposed`` to the linear ones.
    ``check`` compares the weights' checksums over the ranks first, since slices of different matrices would train
    without an error.

    Raises:
        ValueError: for a pattern without a match, a wrong kind of layer, a style that does not exist, heads that
            cannot be shared by the ranks, contradicting ties, hooks or gradients that would be lost, ``keep_inputs``
            or ``decomposed`` without ``sequence_dim``, or ranks that hold different weights. The module is then
            unchanged.
    """
    check_axes(axis=axis)
    check_sequence_dim(sequence_dim)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}: give the torch.nn.Module whose layers are to be split"
        )
    if sequence_dim is None and (keep_inputs or decomposed):
        name = "keep_inputs" if keep_inputs else "decomposed"
        raise ValueError(
            f"{name} is about what is gathered of a split sequence; pass sequence_dim, or leave it out"
        )
    if isinstance(plan, str):
        plan = _plan_by_name(plan, module, axis, sequence_dim)
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    if not plan.styles:
        raise ValueError(
            "the plan names no layer, so nothing would be split; give a mapping such as {'layers.*.fc1': 'column', "
            "'layers.*.fc2': 'row'}, a Plan or 'auto'"
        )
    styles = resolve(module, plan.styles)
    modules = dict(module.named_modules(remove_duplicate=False))
    split = {path: style for path, style in styles.items() if not style.is_mark}
    for path, style in split.items():
        _check_replaceable(path, modules[path])
        _check_heads(path, modules[path], style, axis)
    _check_marks(styles, sequence_dim)
    changes = [*resolve_surroundings(module, plan, axis), *short_cuts(module, split), *withheld(module)]
    if check:
        _check_same({path: modules[path] for path in split}, axis)
    replaced: dict[int, nn.Module] = {}
    done: set[int] = set()
    options = LayerOptions(sequence_dim, keep_inputs, decomposed)
    for path, style in split.items():
        old = modules[path]
        if id(old) not in replaced:
            replaced[id(old)] = split_layer(old, style, axis, options, done)
        if not path:
            return replaced[id(old)]
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, replaced[id(old)])
    marked = [path for path, style in styles.items() if style.is_mark]
    for path in marked:
        mark_partial(modules[path], axis)
    for change in changes:
        change.apply(module)
    keep_trees(module, [*tree_origins(module), TreeOrigin(axis, changes, marked)])
    return module


def _plan_by_name(name: str, module: nn.Module, axis: Axis, sequence_dim: int | None) -> Plan:
    if name != "auto":
        raise ValueError(f"plan {name!r} does not exist; give a mapping, a Plan or 'auto'")
    if sequence_dim is not None:
        raise ValueError(
            f"plan 'auto' with sequence_dim={sequence_dim}: the code of these models reads the sequence's length off "
            "the embeddings, so it cannot be split; leave sequence_dim out"
        )
    return plan_for(module, axis)


def _check_replaceable(path: str, module: nn.Module) -> None:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [hook for name in hooks for hook in getattr(module, name).values()]
    if found:
        hint = ""
        if any(getattr(hook, "__name__", "") == "make_inputs_require_grads" for hook in found):
            hint = (
                ". One is that of transformers' enable_input_require_grads(), which activation_checkpointing_enable() "
                "and gradient_checkpointing_enable() may call: call model.disable_input_require_grads(), and enable "
                "them after the split"
            )
        raise ValueError(
            f"module {path!r} has hooks, which its replacement would lose; register them afterwards{hint}"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.grad is not None:
            raise ValueError(
                f"parameter {path}.{name} has a gradient of the whole weight; split before the first "
                "backward pass, or call zero_grad()"
            )
        if sharding_of(parameter).splits:
            raise ValueError(
                f"parameter {path}.{name} is split already; give parallelize the whole module, once"
            )


def _check_heads(path: str, module: nn.Module, style: Style, axis: Axis) -> None:
    if style.kind not in ("column_heads", "row_heads"):
        return
    inputs, outputs = features_of(module)
    heads = (outputs if style.is_column else inputs) // style.unit
    try:
        split = split_heads(heads, style.unit, axis)
    except ValueError as error:
        raise ValueError(f"module {path!r} ({style}): {error}") from error
    if style.is_row and split.copies > 1:
        raise ValueError(
            f"module {path!r} ({style}) sums over {heads} heads, fewer than the {axis.size} ranks of axis "
            f"{axis.name!r}: heads that ranks share would be summed several times; use at most {heads} ranks"
        )


def _check_marks(styles: Mapping[str, Style], sequence_dim: int | None) -> None:
    for outer, style in styles.items():
        if not style.is_mark:
            continue
        if style.kind == "sequence" and sequence_dim is None:
            raise ValueError(
                "style 'sequence' marks what sees a part of the sequence; pass sequence_dim, or leave it out"
            )
        for inner, other in styles.items():
            if not other.is_mark and (not outer or inner.startswith(f"{outer}.")):
                raise ValueError(
                    f"module {outer!r} is to see a part of what there is ({style}), but {inner!r} in it is to be "
                    f"split ({other}); name the norms themselves"
                )


def _check_same(modules: Mapping[str, nn.Module], axis: Axis) -> None:
    """Compares checksums of all weights over the ranks, in one small collective each way."""
    named = {name: tensor for name, tensor in _weights(modules) if not tensor.is_meta}
    if axis.size == 1 or not named:
        return
    sums = torch.stack([_checksum(tensor) for tensor in named.values()]).nan_to_num()
    low, high = all_reduce(sums.clone(), axis, "min"), all_reduce(sums.clone(), axis, "max")
    wrong = [name for name, same in zip(named, (low == high).tolist(), strict=True) if not same]
    if wrong:
        raise ValueError(
            f"the ranks of axis {axis.name!r} hold different values of {', '.join(wrong[:5])}; their slices "
            "would not be parts of one matrix. Seed all ranks alike before building the module, or load the "
            "same weights"
        )


def _weights(modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, Tensor]]:
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter.detach()


def _checksum(tensor: Tensor) -> Tensor:
    """A number that depends on every element and its place."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    places = torch.linspace(1, 2, 1 << 20, dtype=torch.float64, device=tensor.device)
    for index, piece in enumerate(tensor.flatten().split(1 << 20)):  # no second copy of a large weight
        total += (index + 1) * (piece.to(torch.float64) @ places[: piece.numel()])
    return total
