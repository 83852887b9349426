"""Lets the site read docstrings that use Sphinx roles, as some of ours do: ``:class:`Mesh` `` becomes code.

An extension of griffe, which reads the sources for mkdocstrings; see mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["PlainRoles"]

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):`~?([^`]+)`")
_LITERAL = re.compile(r"::$", re.M)


class PlainRoles(griffe.Extension):
    """Rewrites roles to code, and the double colon before an indented block to a single one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for everything it has read."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL.sub(":", _ROLE.sub(r"`\1`", obj.docstring.value))
