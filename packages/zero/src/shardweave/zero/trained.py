"""Which parameters are trained, agreed over the ranks while training goes on.

[Note: requires_grad may change]
    Layers are unfrozen one after the other, or frozen when they are good enough. A parameter that was frozen when the
    optimizer was built has no place in its units: adapters are trained beside a frozen model many times their size,
    for which nothing may be allocated. So a unit is built for it when it is trained first. That takes collectives, and
    one rank cannot know whether the others have seen the same change. So each step's summary, which is one collective
    anyway, carries how many changes a rank has seen; only if some rank has, all of them say which, and what is trained
    on some ranks and not on others is an error with a name. The gradient that gave the change away is in ``.grad`` by
    then, and takes part in that very step.

    A parameter that is frozen later keeps its place and its moments, and goes on with them if it is trained again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Subscription, gather_values, gradient_work

from .layout import known_name, unit_key
from .precision import MixedPrecision
from .units import Member, partial_axes

__all__ = ["TrainedParameters", "Unfreezing"]


class TrainedParameters:
    """Which of ``parameters`` require gradients: what all ranks agreed on last. See [Note: requires_grad may change].

    ``parameters``: all that the optimizer was given, the same on every data rank, as are their ``names``.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], data: Axis, model: Axis
    ) -> None:
        self._parameters, self._names = tuple(parameters), tuple(names)
        self._data, self._model = data, model
        self._members = [
            Member(index, tuple(parameter.shape), unit_key(parameter, data), known_name(name))
            for index, (parameter, name) in enumerate(zip(parameters, names, strict=True))
        ]
        self._agreed = self._now()

    @property
    def num_changed(self) -> int:
        """Parameters that were frozen or unfrozen on this rank since the ranks agreed."""
        now = self._now()
        return 0 if now == self._agreed else sum(a != b for a, b in zip(now, self._agreed, strict=True))

    def agree(self) -> None:
        """All ranks of the data and the model axis call it, when any of them has a change.

        ValueError, on all of them: a parameter is trained on some of the ranks that hold it and frozen on others.
        """
        now = self._now()
        problems = self._differ_on_data(now)
        for axis in partial_axes(self._members):
            problems += self._differ_on_copies(now, axis)
        told = gather_values(gather_values(problems, self._data), self._model)
        found = dict.fromkeys(problem for of_data in told for of_rank in of_data for problem in of_rank)
        if found:
            raise ValueError("; ".join(found) + "; set requires_grad alike on all ranks, between steps")
        self._agreed = now

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _differ_on_data(self, now: Sequence[bool]) -> list[str]:
        told = gather_values(list(now), self._data)
        found = []
        for name, *flags in zip(self._names, *told, strict=True):
            trained = [rank for rank, flag in zip(self._data.ranks, flags, strict=True) if flag]
            frozen = [rank for rank in self._data.ranks if rank not in trained]
            if trained and frozen:
                found.append(f"parameter {name} is trained on ranks {trained} and frozen on {frozen}")
        return found

    def _differ_on_copies(self, now: Sequence[bool], axis: Axis) -> list[str]:
        """Copies have their names in common, and where they have none, their number and shapes."""
        mine = sorted(
            [member.name, member.shape, now[member.index]]
            for member in self._members
            if axis in member.key.partial
        )
        told = gather_values(mine, axis)
        if all(others == told[0] for others in told):
            return []
        other = next(others for others in told if others != told[0])
        names = sorted(
            {
                one[0] or "without a name"
                for one in (*other, *told[0])
                if one not in other or one not in told[0]
            }
        )
        return [
            f"parameter {', '.join(names)} is trained on some and frozen on others of ranks {list(axis.ranks)}, which "
            "have copies of it"
        ]


class Unfreezing:
    """Frozen parameters that wait for being trained; they have no memory but their own.

    The module computes with them too, so they get the format it computes with. And the first gradients of a parameter
    arrive before anybody knows that it is trained now: they are added up in the format that they will have in a unit.
    ``placed``: frozen ones that have their place in a unit, and their format, from the start (stage 3).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        precision: MixedPrecision,
        placed: Sequence[nn.Parameter] = (),
    ) -> None:
        self.parameters, self._placed = list(parameters), list(placed)
        self._subscriptions: dict[int, Subscription] = {}
        for parameter in parameters:
            if parameter.is_floating_point():
                formats = precision.resolve(parameter.dtype)
                if formats.parameters != parameter.dtype:
                    parameter.data = parameter.data.to(formats.parameters)
                if formats.gradients != parameter.dtype:
                    self._watch(parameter, formats.gradients)
        for parameter in placed:  # all: who reduces their unit has to hear of them, trained or not
            self._watch(parameter, precision.resolve(parameter.dtype).gradients)

    def taken(self, parameters: Sequence[nn.Parameter]) -> None:
        """The gradients of these are collected in a unit now."""
        for parameter in parameters:
            self.parameters = [one for one in self.parameters if one is not parameter]
            self._placed = [one for one in self._placed if one is not parameter]
            subscription = self._subscriptions.pop(id(parameter), None)
            if subscription is not None:
                subscription.remove()

    def drop_gradients(self) -> None:
        """Forgets gradients that nobody asked for."""
        for parameter in (*self.parameters, *self._placed):
            parameter.grad = None

    def _watch(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        owner = weakref.ref(self)

        def widen(arrived: Tensor) -> None:
            if owner() is not None and arrived.grad is not None and arrived.grad.dtype != dtype:
                arrived.grad = arrived.grad.to(dtype)

        parameter.grad_dtype = None
        parameter.requires_grad_(True)  # a hook can be put on what requires a gradient only, and stays
        self._subscriptions[id(parameter)] = gradient_work(parameter).subscribe(parameter, widen, every=True)
        parameter.requires_grad_(False)
