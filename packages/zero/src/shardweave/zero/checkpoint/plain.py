"""Values as JSON holds them, and back with the keys that they had.

JSON turns a dict's keys into text. A scheduler that looks up ``milestones[2]`` would then find none, and go on with the
wrong learning rate without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["from_plain", "to_plain"]

_ITEMS = "__items__"
"""Stands for a dict whose keys are not all text, in a dict of its own."""


def to_plain(value: Any) -> Any:
    """Numbers, text, lists and dicts with keys of any of these, in what JSON can hold.

    >>> to_plain({"milestones": {2: 1}})
    {'milestones': {'__items__': [[2, 1]]}}
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _ITEMS not in value:
            return {key: to_plain(one) for key, one in value.items()}
        return {_ITEMS: [[to_plain(key), to_plain(one)] for key, one in value.items()]}
    return [to_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def from_plain(value: Any) -> Any:
    """What :func:`to_plain` was given; tuples are lists, but as keys.

    >>> from_plain({"milestones": {"__items__": [[2, 1]]}})
    {'milestones': {2: 1}}
    """
    if isinstance(value, dict):
        if value.keys() == {_ITEMS}:
            return {_key(key): from_plain(one) for key, one in value[_ITEMS]}
        return {key: from_plain(one) for key, one in value.items()}
    return [from_plain(one) for one in value] if isinstance(value, list) else value


def _key(value: Any) -> Any:
    return tuple(_key(one) for one in value) if isinstance(value, list) else value
