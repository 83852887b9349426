"""Plans of names, resolved before a module is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardweave.tensor_parallel.plans import Style, parse_style, resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=False)


def test_patterns_match_by_component() -> None:
    model = Model()
    styles = resolve(
        model, {"layers.*.fc1": "column:3", "**.fc2": "row", "embed": "vocab", "layers.1.norm": "sequence"}
    )
    assert {path: str(style) for path, style in styles.items()} == {
        "layers.0.fc1": "column:3",
        "layers.1.fc1": "column:3",
        "layers.0.fc2": "row",
        "layers.1.fc2": "row",
        "embed": "vocab",
        "layers.1.norm": "sequence",
    }
    assert resolve(model.head, {"": "column"}) == {"": Style("column")}
    assert set(resolve(model, {"layers.?.fc[12]": "column"})) == {
        f"layers.{i}.fc{j}" for i in (0, 1) for j in (1, 2)
    }


@pytest.mark.parametrize("text", ["colum", "row:2", "column:", "column:0", "column:x", ""])
def test_a_style_that_does_not_exist_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=rf"style '{text}' does not exist; use one of column, "):
        parse_style(text)


@pytest.mark.parametrize(
    "plan, message",
    [
        (
            {"layers.*.fc3": "column"},
            r"pattern 'layers.\*.fc3' matches no module; there are, for example: layers",
        ),
        ({"fc1": "column"}, r"pattern 'fc1' matches no module"),
        ({"embed": "column"}, "module 'embed' is a Embedding; column splits Linear"),
        ({"head": "vocab"}, "module 'head' is a Linear; vocab splits Embedding"),
        ({"layers.0": "row"}, "module 'layers.0' is a Block; row splits Linear"),
        ({"head": "column:2"}, "module 'head' has 7 output features, not 2 equal blocks"),
        (
            {"layers.*.fc1": "column", "layers.0.*1": "row"},
            r"'layers.0.fc1' is column by pattern 'layers.\*.fc1' and row by 'layers.0.\*1'",
        ),
    ],
)
def test_mistakes_are_named(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(Model(), plan)


def test_layers_that_compute_something_else_are_refused() -> None:
    class Other(nn.Linear):
        pass

    with pytest.raises(ValueError, match="is a Other"):
        resolve(nn.Sequential(Other(2, 2)), {"0": "column"})
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="is a ParametrizedLinear"):
        resolve(model, {"0": "column"})
    with pytest.raises(ValueError, match=r"embedding '0' has max_norm=1\.0"):
        resolve(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), {"0": "vocab"})


def test_ties_have_to_be_split_alike() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert len(resolve(model, {"embed": "vocab", "head": "column"})) == 2
    for plan in ({"embed": "vocab"}, {"embed": "vocab", "head": "row"}, {"head": "column_gather"}):
        with pytest.raises(ValueError, match=r"several names .*: embed.weight \(.*\), head.weight \("):
            resolve(model, plan)
    fused = nn.Sequential(nn.Linear(2, 4), nn.Linear(2, 4))
    fused[1].weight = fused[0].weight
    with pytest.raises(ValueError, match="becomes several parameters and cannot be tied"):
        resolve(fused, {"*": "column:2"})
    assert torch.equal(model.head.weight, model.embed.weight)
