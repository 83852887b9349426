"""Text over tensor ranks, pipeline stages and both, against one process that keeps nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardweave.comm import Axis, Mesh
from shardweave.launcher.continuing import continue_together
from shardweave.models import Transformer, TransformerConfig, generate, parts_from_ranges
from shardweave.pipeline import RULES, Pipeline, schedule

_SMALL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 11, "sequence": 8}

CONFIGS = (
    TransformerConfig(**_SMALL, position="learned"),
    TransformerConfig(**_SMALL, position="alibi", embedding_norm=True),
    TransformerConfig(
        **_SMALL, position="rotary", kv_heads=2, norm="rmsnorm", activation="swiglu", tie_embeddings=False
    ),
    TransformerConfig(**_SMALL, position="rotary", experts=4, expert_capacity=1.0),
)
"""The last one's tokens compete for experts, so that nothing can be kept."""

PROMPTS = ([[3, 1, 4]], [[1, 5, 9, 2, 6], [5, 3, 5, 8, 9]], [[7]])
"""Of different lengths, one of two rows; the second gets longer than the sequence of 8."""

STAGES = {
    2: [range(2), range(2, 4)],
    4: [range(1), range(1, 2), range(2, 3), range(3, 4)],
}
"""By number of stages: pieces (embedding, two blocks, head); with four, the first stage has no block."""

LAYOUTS: tuple[tuple[dict[str, int], str, int], ...] = (
    ({"tp": 4}, "1f1b", 2),
    ({"tp": 2, "pp": 2}, "1f1b", 2),
    ({"pp": 4}, "1f1b", 4),
    ({"dp": 2, "pp": 2}, "interleaved", 4),
    ({"tp": 2, "pp": 2}, "zb-v", 4),
)
"""Axes, where the schedule puts stages, and how many there are. In a V the first rank has the head, too."""


def _model(config: TransformerConfig, **options: Any) -> Transformer:
    """With weights large enough that tokens differ in how likely they are."""
    model = Transformer(config, seed=3, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    return model


def _stages(
    config: TransformerConfig, mesh: Mesh, name: str, count: int
) -> tuple[list[Transformer], Pipeline]:
    ranks = mesh.pp.size
    plan = schedule(name, ranks=ranks, chunks=count // ranks, micro_batches=RULES[name].least(ranks))
    parts = parts_from_ranges(config, STAGES[count])
    modules = [_model(config, part=parts[stage], tensor=mesh.tp) for stage in plan.stages_of(mesh.pp.rank)]
    tied = [module for module in modules if module.tied_parameters()]
    if len(tied) == 2:
        tied[1].share_embedding(tied[0])
    return modules, Pipeline(modules, mesh.pp, plan)


def _mesh(*, dp: int = 1, tp: int = 1, pp: int = 1) -> Mesh:
    return Mesh(dp=dp, tp=tp, pp=pp)


def _built(
    config: TransformerConfig, mesh: Mesh, name: str, count: int
) -> tuple[list[Transformer], Pipeline]:
    if mesh.pp.size > 1:
        return _stages(config, mesh, name, count)
    model = _model(config, tensor=mesh.tp)
    return [model], Pipeline([model], mesh.pp, schedule(name, ranks=1, micro_batches=1))


@pytest.mark.ranks(4)
def test_the_text_is_the_same_in_every_layout() -> None:
    prompts = [torch.tensor(rows) for rows in PROMPTS]
    meshes = {str(axes): _mesh(**axes) for axes, _, _ in LAYOUTS}
    for number, config in enumerate(CONFIGS):
        alone = _model(config, tensor=Axis.single())
        layouts = LAYOUTS if number < 2 else LAYOUTS[1:2]
        built = [(axes, *_built(config, meshes[str(axes)], name, count)) for axes, name, count in layouts]
        for temperature, cache in ((1.5, True), (0.0, True), (1.5, False))[: 3 if number == 0 else 1]:
            expected = [
                generate(
                    alone, prompt, 5, temperature=temperature, top_k=9, cache=False,
                    generator=torch.Generator().manual_seed(6),
                )
                for prompt in prompts
            ]  # fmt: skip
            for axes, modules, pipeline in built:
                found = continue_together(
                    meshes[str(axes)], modules, pipeline, prompts, 5, temperature=temperature, top_k=9, seed=6,
                    cache=cache,
                )  # fmt: skip
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one, other), (axes, config.position, temperature, cache)
