"""What is compared, and in which order it is computed: the order in which a first difference is looked for.

A step computes in this order, and a mistake spreads in this order, too::

    hidden states    received and computed, block by block
    loss
    gradients        from the head back: what flows into a block's output, its parameters, what it sends back
    norm
    parameters       after the update

The model is a row of pieces, as the pipeline's partitioner sees it: the embedding, the blocks, the head. Hidden states
are named by the piece that computed them, ``embedding`` or ``layers.3``; parameters by their canonical names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

__all__ = ["KINDS", "Kind", "causal_order", "embedding_place", "hidden_places", "layer_place", "phrase"]

Kind = Literal["start", "received", "hidden", "loss", "flow", "sent", "gradient", "norm", "parameter"]
"""
========== ================================================================================
start      a parameter before the first step
received   hidden states as they came from the stage before
hidden     hidden states as a piece computed them
loss       the step's, over the global batch
flow       the gradient of a piece's hidden states, as it came from the pieces behind
sent       the same, as a stage sends it to the stage before
gradient   of a parameter: reduced, before clipping
norm       the global gradient norm
parameter  after the step
========== ================================================================================
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

_EMBEDDING = ("embedding", "position", "embedding_norm")


def embedding_place() -> str:
    """Where the hidden states come from that enter block 0."""
    return "embedding"


def layer_place(layer: int) -> str:
    """Where the hidden states come from that leave a block; ``layer_place(-1)``: that enter the first one."""
    return f"layers.{layer}" if layer >= 0 else embedding_place()


def hidden_places(layers: int) -> list[str]:
    """All of them, in order."""
    return [layer_place(layer) for layer in range(-1, layers)]


def _piece(name: str, layers: int) -> int:
    """0 for the embedding, 1 + n for block n, then the head."""
    head, _, rest = name.partition(".")
    if head == "layers":
        return 1 + int(rest.partition(".")[0])
    return 0 if head in _EMBEDDING else layers + 1


def causal_order(step: int, kind: Kind, name: str, layers: int, names: Sequence[str]) -> tuple[int, ...]:
    """A key that sorts differences by when they arise. `names`: the parameters in the order of the model."""
    if kind == "start":
        return (0, 0, names.index(name))
    if kind in ("received", "hidden"):
        return (step, 1, _piece(name, layers), int(kind == "received"))
    if kind in ("flow", "sent", "gradient"):
        # The gradient of piece n's hidden states is known before anything of piece n; a stage sends it before the
        # stage that it goes to has it.
        piece, within = -_piece(name, layers), {"sent": 0, "flow": 1, "gradient": 2}[kind]
        return (step, 3, piece, within, -names.index(name) if kind == "gradient" else 0)
    if kind == "parameter":
        return (step, 5, names.index(name))
    return (step, 2 if kind == "loss" else 4)


def phrase(kind: Kind, name: str) -> str:
    """The compared thing in words."""
    words = {
        "start": f"the initial value of {name}",
        "received": f"what arrived from {_said(name)}",
        "hidden": f"the output of {_said(name)}",
        "loss": "the loss",
        "flow": f"the gradient of the output of {_said(name)}",
        "sent": f"the gradient sent back to {_said(name)}",
        "gradient": f"the gradient of {name}",
        "norm": "the gradient norm",
        "parameter": f"the parameter {name}",
    }
    return words[kind]


def _said(place: str) -> str:
    return "the embedding" if place == embedding_place() else place
