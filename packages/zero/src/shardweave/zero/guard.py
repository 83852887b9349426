"""Parameters that may be released: whoever touches one finds its values there.

Between the moments at which a module needs it, a unit's memory is gone, and its parameters keep their shape and nothing
else. Reading such a tensor would be a crash, or worse a number. Hooks on modules cannot prevent that: parameters are
read by other modules (tied weights), by penalties in the loss, by layers that are called twice, and again in the
backward pass, in an order that nobody announces. So the parameter itself watches: its class has a
``__torch_function__`` through which torch sends every function that gets it as an argument::

    F.linear(x, weight)      1. weight's unit is gathered, unless it is there
                             2. the function runs, on a plain tensor as always
                             3. the result's autograd node will ask for the unit again before it runs backward;
                                all nodes that the function made, where some parameters are frozen
    weight.detach()          the result is a view of the same memory, so it watches as well
    weight.shape, .grad, ... need no values, and gather nothing

It costs microseconds per use. An embedding's node, which does not read its weight, does not ask.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

__all__ = [
    "GuardedParameter",
    "Resident",
    "guard",
    "mapped",
    "resident_of",
    "tensors",
    "unguard",
    "watch_outputs",
]

_ATTRIBUTE = "_shardweave_resident"


class Resident(Protocol):
    """What a guarded tensor's memory belongs to."""

    def use(self, along: Sequence[Resident]) -> None:
        """The values are needed now, together with those ``along``."""
        ...

    def use_in_backward(self) -> None:
        """The values are needed by an autograd node that is about to run."""
        ...

    @property
    def in_backward(self) -> bool:
        """Whether that was said in this backward pass."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether some parameters get no gradients, by which one could tell that the last node has read them."""
        ...

    def touch(self) -> None:
        """Somebody writes to the values by a way that moves no parameter's version."""
        ...

    def shares(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the same memory."""
        ...

    def end(self) -> None:
        """All parameters that are gathered together with this one are whole from now on, and plain; collective."""
        ...


class GuardedParameter(nn.Parameter):
    """An ``nn.Parameter`` whose memory comes and goes. Made by :func:`guard`, in place."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _watched(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own, with the values and without a guard."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override] # torch's takes an option of no use here
        """Without its values: they may not be here."""
        with torch._C.DisableTorchFunctionSubclass():
            return (
                f"Parameter(sharded, {tuple(self.shape)}, {self.dtype}, requires_grad={self.requires_grad})"
            )


class _GuardedView(Tensor):
    """Some of a guarded parameter's memory: ``detach()``, ``.data``, a transpose."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _watched(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor of its own, as when it is saved."""
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def guard(parameter: nn.Parameter, resident: Resident) -> None:
    """From now on ``resident`` is asked before anybody uses the parameter's values."""
    setattr(parameter, _ATTRIBUTE, weakref.ref(resident))
    parameter.__class__ = GuardedParameter


def resident_of(parameter: nn.Parameter) -> Resident | None:
    """Whom a guarded parameter belongs to."""
    if not isinstance(parameter, GuardedParameter):
        return None
    found: Resident | None = parameter.__dict__[_ATTRIBUTE]()
    return found


def unguard(parameter: nn.Parameter) -> None:
    """A plain parameter again, while its values are there for certain."""
    parameter.__class__ = nn.Parameter


def _getters(*names: str) -> Iterator[Any]:
    for name in names:
        descriptor = getattr(Tensor, name, None)
        if descriptor is not None:
            yield descriptor.__get__
            if hasattr(descriptor, "__set__"):
                yield descriptor.__set__


_WITHOUT_VALUES = frozenset(
    [
        *_getters(
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name"),
            *(
                "is_cpu",
                "is_cuda",
                "is_meta",
                "is_sparse",
                "is_quantized",
                "is_mkldnn",
                "is_nested",
                "is_mps",
            ),
            *("is_xpu", "is_xla", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "is_sparse_csr"),
            *("grad", "grad_fn", "grad_dtype", "requires_grad", "is_leaf", "retains_grad", "output_nr"),
            *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_grad", "_grad_fn"),
        ),
        *(
            getattr(Tensor, name)
            for name in (
                *(
                    "size",
                    "dim",
                    "ndimension",
                    "numel",
                    "nelement",
                    "stride",
                    "storage_offset",
                    "element_size",
                ),
                *(
                    "is_contiguous",
                    "is_floating_point",
                    "is_complex",
                    "is_signed",
                    "is_inference",
                    "get_device",
                ),
                *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
                *("untyped_storage", "__hash__", "__len__", "is_pinned", "is_shared", "_is_view"),
            )
            if hasattr(Tensor, name)
        ),
        Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_tensor,
    ]
)
"""What tells something of a tensor without reading its values."""

_BLIND_NODE = "EmbeddingBackward0"
"""Does not read the weight in the backward pass. (Many others do not either, but may stand for others behind them:
``F.linear`` ends with a view of a product.)"""
_LEAF = "torch::autograd::AccumulateGrad"
_WRITTEN = "torch::autograd::CopySlices"
"""Of a tensor a part of which was written to in place."""


_GRAD = inspect.signature(torch.autograd.grad)

_SHARES_OUTSIDE = frozenset([Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])
"""What hands the memory itself to others than torch, who would look at it when it is gone. They get a copy."""


def _watched(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if func in _WITHOUT_VALUES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is torch.autograd.grad:
        return _gradients(args, kwargs)
    # In a training step nothing of this is in the processor's caches: every call counts.
    residents, views = _residents(args, kwargs)
    for resident in residents:
        resident.use(residents)
    with torch._C.DisableTorchFunctionSubclass():
        before = _nodes((args, kwargs)) if any(resident.frozen for resident in residents) else ()
        if func in _SHARES_OUTSIDE:
            args = (args[0].clone(), *args[1:])
        result = func(*args, **kwargs)
        if views:
            _note_writes(func, args, kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else tensors(result):
            for resident in residents:
                _watch(tensor, resident, before)
    return result


def _watch(tensor: Tensor, resident: Resident, before: Collection[Node]) -> None:
    """Has the backward pass through ``tensor`` ask for the unit, and whoever uses it if it is a view."""
    kind = type(tensor)
    if kind is GuardedParameter or kind is _GuardedView:
        return  # the result of an operation in place
    if kind is Tensor and resident.shares(tensor):
        # A view: whoever uses it will be watched, and it reads nothing itself.
        tensor.__class__ = _GuardedView
        setattr(tensor, _ATTRIBUTE, weakref.ref(resident))
        return
    node = tensor.grad_fn
    if node is not None and node.name() != _BLIND_NODE:
        _ask_before(node, resident, before)
        # What was written to in place may be a part of another tensor, and the pass come through that one.
        whole = None if tensor._base is None else tensor._base.grad_fn
        if whole is not None and whole.name() == _WRITTEN and whole not in before:
            _ask_before(whole, resident, before)


def watch_outputs(outputs: Any, resident: Resident, inputs: Any) -> None:
    """Has the backward pass through what a module made of ``inputs`` ask for the unit, where no parameter could see to
    it."""
    before = _nodes(inputs) if resident.frozen else ()
    for tensor in tensors(outputs):
        if tensor.grad_fn is not None:
            _ask_before(tensor.grad_fn, resident, before)


def _ask_before(node: Node, resident: Resident, before: Collection[Node]) -> None:
    """A function's last node, ``node``, asks, which runs first. Those between it and the nodes ``before`` the function
    run while the unit waits for its gradients; where some get none, each asks."""
    asked = weakref.ref(resident)

    def ask(gradients: Any) -> None:
        alive = asked()
        if alive is not None and (not alive.in_backward or torch.is_grad_enabled()):
            alive.use_in_backward()

    for one in _between(node, before) if resident.frozen else (node,):
        one.register_prehook(ask)


def _between(last: Node, before: Collection[Node]) -> list[Node]:
    """``last`` and what it leads to, up to the nodes ``before`` and the leaves."""
    found, seen = [last], {last, *before}
    for node in found:
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following.name() != _LEAF:
                seen.add(following)
                found.append(following)
    return found


def _nodes(values: Any) -> list[Node]:
    """The autograd nodes of all tensors in it, and of those that they are views of."""
    found = [one for tensor in tensors(values) for one in (tensor, tensor._base) if one is not None]
    return [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]


def _gradients(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``. Watching goes on inside: what is asked for are the parameters' places in the graph, not
    they themselves. For a place torch makes no zeros, so they are made here."""
    asked = _GRAD.bind(*args, **kwargs).arguments
    inputs = (asked["inputs"],) if isinstance(asked["inputs"], Tensor) else tuple(asked["inputs"])
    zeros = asked.get("materialize_grads", False) and asked.get("allow_unused") is not False
    zeros = zeros and all(isinstance(one, Tensor) for one in inputs)
    if zeros:
        asked |= {"materialize_grads": False, "allow_unused": True}
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        **{name: _as_edges(value) for name, value in asked.items()}
    )
    if not zeros:
        return found
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(
            torch.zeros_like(one, requires_grad=asked.get("create_graph", False))
            if gradient is None
            else gradient
            for one, gradient in zip(inputs, found, strict=True)
        )


def _as_edges(value: Any) -> Any:
    if isinstance(value, GuardedParameter):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(value)
    return type(value)(_as_edges(item) for item in value) if type(value) in (tuple, list) else value


def _note_writes(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Writing to ``parameter.data`` or to another view moves no version of the parameter."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in (
        "__setitem__",
        "__iadd__",
        "__imul__",
    )
    targets = [args[0]] if in_place and args else []
    targets += list(tensors(kwargs.get("out")))
    for target in targets:
        if isinstance(target, _GuardedView):
            for resident in _residents((target,), {})[0]:
                resident.touch()


def _residents(args: Any, kwargs: dict[str, Any]) -> tuple[list[Resident], bool]:
    """Whose values a function is given; and whether there are views among them."""
    found: list[Resident] = []
    views = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is not GuardedParameter and kind is not _GuardedView:
            if not isinstance(value, (tuple, list, dict)):
                continue
            inside, among = _residents(tuple(value.values()) if isinstance(value, dict) else value, {})
            views = views or among
        else:
            reference = value.__dict__.get(_ATTRIBUTE)
            resident = None if reference is None else reference()
            inside = [] if resident is None else [resident]
            views = views or kind is _GuardedView
        for resident in inside:
            if not any(resident is other for other in found):
                found.append(resident)
    return found, views


def tensors(value: Any) -> Iterable[Tensor]:
    """All that are in it, however deep in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of every tensor in it, however deep in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return value
