"""``shardweave verify``: is this layout the same training run as one process?

One process and the layout train on the same data for a few steps, and everything that has to be equal is compared
on the rank that holds it, so that a difference has a place: step, layer, parameter, rank::

    shrinking    the configuration, made small with the same structure and divisibility      (pure)
    watching     what a trainer computes: hidden states, gradients, parameters               (hooks)
    capture      the one process' values, on every rank
    comparison   what counts as equal, by kind and precision
    explanation  what a difference looks like: a factor, swapped samples, a count in the norm
    report       all ranks' findings, in causal order
    layout       the whole of it on a mesh                            local, joined, show: the command

Nothing is imported here: the command starts its ranks' zygote before torch is imported.
"""

from __future__ import annotations

__all__: list[str] = []
