"""Which parameters are gathered together: a pure function of the module tree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardweave.zero.module_units import UnitChoice, module_units


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Net(nn.Module):
    """An embedding, three layers, a small norm, and a head tied to the embedding."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 200, bias=False)
        self.head.weight = self.embedding.weight


def units(
    *roots: nn.Module,
    limit: int = 10**6,
    choice: UnitChoice | None = None,
    parameters: list[nn.Parameter] | None = None,
) -> dict[str, int]:
    """Unit by unit: its elements."""
    wanted = list(dict.fromkeys(p for root in roots for p in root.parameters()))
    found = module_units(roots, wanted if parameters is None else parameters, limit=limit, choice=choice)
    placed = [parameter for unit in found for parameter in unit.parameters]
    assert {id(p) for p in placed} >= {id(p) for p in (wanted if parameters is None else parameters)}
    assert len({id(p) for p in placed}) == len(placed)
    return {unit.name: sum(p.numel() for p in unit.parameters) for unit in found}


def test_layers_of_a_list_are_units_and_what_is_small_goes_to_the_root() -> None:
    layer = 20 + 110
    assert units(Net()) == {
        "embedding": 2000,
        "layers.0": layer,
        "layers.1": layer,
        "layers.2": layer,
        "": 20,
    }


def test_what_is_larger_than_the_limit_is_parted() -> None:
    found = units(Net(40), limit=1000)
    assert found == {
        "embedding": 8000,  # one parameter cannot be parted
        **{f"layers.{n}.inner.0": 1640 for n in range(3)},
        "": 4 * 80,  # all norms
    }


def test_what_was_chosen_and_the_rest() -> None:
    net = Net()
    assert units(net, choice=[]) == {"": 2410}
    assert units(net, choice=[Layer]) == {"layers.0": 130, "layers.1": 130, "layers.2": 130, "": 2020}
    assert units(net, choice=["layers.1", net.embedding, nn.LayerNorm]) == {
        "embedding": 2000,
        "layers.0.norm": 20,
        "layers.1": 110,
        "layers.1.norm": 20,
        "layers.2.norm": 20,
        "norm": 20,
        "": 220,
    }
    for choice, words in (
        (["layers.7"], "layers.7 is no module of Net"),
        ([nn.Conv2d], "is no module of Net"),
        ([nn.Linear(2, 2)], "is no module of Net"),
        (["layers"], "ModuleList has no forward"),
    ):
        with pytest.raises(ValueError, match=words):
            units(net, choice=choice)


def test_several_roots_and_parameters_elsewhere() -> None:
    stage, other = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), nn.Linear(10, 10)
    alone = nn.Parameter(torch.zeros(7))
    found = units(stage, other, parameters=[*stage.parameters(), *other.parameters(), alone])
    assert found == {"0": 110, "1": 110, "": 7}  # the second root's is the last with this name
    parts = module_units([stage, other], [*stage.parameters(), *other.parameters()], limit=10**6)
    assert [part.module for part in parts] == [stage[0], stage[1], other]


def test_only_the_parameters_that_are_given() -> None:
    net = Net()
    assert units(net, parameters=[net.norm.weight, *net.embedding.parameters()]) == {
        "embedding": 2000,
        "": 10,
    }
    assert units(net, parameters=[]) == {}
