"""Parameters by kind: worked by hand, and adding up to all of them in every layout."""

from __future__ import annotations

from packages.models.tests.reference import FAMILIES, MIXTURES

from shardweave.models import KINDS, Part, count_parameters, parameter_kinds, preset


def test_gpt2() -> None:
    h, layers = 768, 12
    assert parameter_kinds(preset("gpt2")) == {
        "embedding": (50257 + 1024) * h,
        "attention": layers * (4 * h * h + 4 * h),
        "mlp": layers * (8 * h * h + 5 * h),
        "norm": (2 * layers + 1) * 2 * h,
        "head": 0,
    }
    assert parameter_kinds(preset("llama-3-8b"))["head"] == 128256 * 4096


def test_kinds_add_up_in_every_layout() -> None:
    for config in (*FAMILIES.values(), *MIXTURES.values()):
        for part in (None, Part(1, 2, embedding=False, head=True)):
            for tensor, rank in ((1, 0), (2, 1), (4, 3)):
                expert = 2 if config.experts else 1
                kinds = parameter_kinds(config, part=part, tensor=tensor, rank=rank, expert=expert)
                whole = count_parameters(config, part=part, tensor=tensor, rank=rank, expert=expert)
                assert sum(kinds.values()) == whole
                assert tuple(kinds) == KINDS
    # q and k norms of a head are norms; routers are the MLP's
    assert parameter_kinds(FAMILIES["plain"])["norm"] == 2 * (2 * 2 * 16 + 2 * 2 * 4) + 2 * 16
    assert parameter_kinds(MIXTURES["mixtral"])["mlp"] == 2 * (4 * 16 + 4 * 3 * 13 * 16)
