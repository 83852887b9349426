"""Cutting a model into stages: of anything, keeping names, dropping nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.pipeline import (
    Piece,
    Pipeline,
    StageModule,
    cut,
    partition,
    pieces_of,
    schedule,
    shared_parameters,
    tie_all,
)


def layers(count: int = 5) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(4, 4, dtype=torch.float64) if index % 2 else nn.Tanh() for index in range(count)]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


@pytest.mark.parametrize("kind", [list, nn.ModuleList, lambda its: nn.Sequential(*its)])
def test_lists_and_sequentials_are_cut_without_a_word(kind: type) -> None:
    whole = nn.Sequential(*layers())
    model = kind(list(whole))
    assert pieces_of(model) == [Piece((str(index),)) for index in range(5)]
    stages = cut(model, partition([1.0] * 5, 3))
    assert [list(stage.state_dict()) for stage in stages] == [
        [],
        ["1.weight", "1.bias"],
        ["3.weight", "3.bias"],
    ]
    x = torch.randn(3, 4, dtype=torch.float64)
    y = x
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, whole(x))
    assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in whole.parameters()}


def test_names_of_a_sequential_are_kept() -> None:
    model = nn.Sequential()
    model.add_module("down", nn.Linear(4, 2))
    model.add_module("up", nn.Linear(2, 4))
    first, last = cut(model, [range(1), range(1, 2)])
    assert list(first.state_dict()) == ["down.weight", "down.bias"]
    assert {**first.state_dict(), **last.state_dict()}.keys() == model.state_dict().keys()
    last.load_state_dict({name: torch.ones_like(its) for name, its in last.state_dict().items()})
    assert torch.equal(model.get_parameter("up.weight"), torch.ones(4, 2))  # its own submodule, not a copy


class Language(nn.Module):
    """A model with an embedding that is also its head, a mask and a scale; it says how it is cut."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Module()
        self.body.embed = self.embed = nn.Embedding(7, 4, dtype=torch.float64)
        self.body.blocks = self.blocks = nn.ModuleList(
            nn.Linear(4, 4, dtype=torch.float64) for _ in range(depth)
        )
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
        hidden, count = embed(self.embed, tokens, scale=scale)
        for linear in self.blocks:
            hidden, count = block(linear, hidden, count, mask=mask)
        return head(self.head, hidden, count, scale=scale)

    def pieces(self) -> list[Piece]:
        blocks = [Piece((f"body.blocks.{index}",), block) for index in range(len(self.blocks))]
        return [Piece(("body.embed",), embed), *blocks, Piece(("head",), head)]


def embed(table: nn.Module, tokens: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return table(tokens) * scale, torch.zeros((), dtype=torch.int64)


def block(linear: nn.Module, hidden: Tensor, count: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
    return hidden + torch.tanh(linear(hidden)) * mask, count + 1


def head(linear: nn.Module, hidden: Tensor, count: Tensor, *, scale: float = 1.0) -> Tensor:
    logits: Tensor = linear(hidden) / (count + scale)
    return logits


def batches() -> tuple[list[Tensor], list[Tensor], list[dict[str, object]]]:
    torch.manual_seed(5)
    tokens = [torch.randint(7, (2, 3)) for _ in range(3)]
    targets = [torch.randn(2, 3, 7, dtype=torch.float64) for _ in range(3)]
    arguments: list[dict[str, object]] = [
        {"mask": torch.rand(2, 3, 1, dtype=torch.float64), "scale": 0.5 + index} for index in range(3)
    ]
    return tokens, targets, arguments


def test_a_model_that_says_how_it_is_cut_trains_as_a_whole() -> None:
    """Several tensors between stages, keywords to the pieces that take them, and a tie."""
    whole, model = Language(), Language()
    plan = schedule("interleaved", ranks=1, chunks=4, micro_batches=3)
    stages = cut(model, partition([0.5, 1, 1, 1, 2], 4))
    ties = shared_parameters(stages, plan.stages_of(0))
    assert ties == {"body.embed.weight": {0: model.head.weight, 3: model.head.weight}}
    axis = Axis.single("pp")
    tie_all(ties, axis, rank_of_stage=plan.rank_of_stage)
    tokens, targets, arguments = batches()
    total = Pipeline(stages, axis, plan, loss=squares).step(tokens, targets, arguments=arguments)
    expected = torch.zeros((), dtype=torch.float64)
    for x, target, keywords in zip(tokens, targets, arguments, strict=True):
        loss = squares(whole(x, **keywords), target)
        loss.backward()
        expected += loss.detach()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_what_a_rank_does_not_hold_is_none() -> None:
    stages = cut(Language(), partition([0.5, 1, 1, 1, 2], 4))
    (places,) = shared_parameters(stages, [3]).values()
    assert places == {0: None, 3: stages[3].get_parameter("head.weight")}
    assert shared_parameters(cut(layers(), [range(2), range(2, 5)]), [0]) == {}


def test_a_module_that_is_there_twice_is_shared() -> None:
    shared = nn.Linear(3, 3)
    stages = cut(nn.Sequential(shared, nn.Tanh(), shared), [range(1), range(1, 3)])
    assert shared_parameters(stages, [0, 1]) == {
        "0.weight": {0: shared.weight, 1: shared.weight},
        "0.bias": {0: shared.bias, 1: shared.bias},
    }


def test_keywords_that_no_piece_takes_are_refused() -> None:
    first, last = cut(Language(), [range(1), range(1, 5)])
    assert isinstance(first, StageModule)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    value = first(tokens, mask=torch.ones(1), scale=2.0)  # the mask is for other stages
    assert last(*value, mask=torch.ones(1), scale=2.0).shape == (1, 2, 7)
    with pytest.raises(ValueError, match="no piece of the model takes 'msak'; its pieces take"):
        first(tokens, msak=torch.ones(1))


class NoPieces(nn.Module):
    pass


class Forgetful(nn.Module):
    """Leaves a parameter to no stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def pieces(self) -> list[Piece]:
        return [Piece(("one",))]


def test_b037_what_would_be_dropped_is_refused() -> None:
    model = layers()
    for ranges in (
        [range(2), range(3, 5)],
        [range(3), range(2, 5)],
        [range(4)],
        [range(1, 3), range(3, 5), range(1)],
    ):
        with pytest.raises(ValueError, match="do not have each of the 5 pieces once and in order"):
            cut(model, ranges)
    with pytest.raises(ValueError, match=r"two.weight belongs to no piece \(2 parameters"):
        cut(Forgetful(), [range(1)])
    with pytest.raises(
        ValueError, match=r"no way is known to cut a NoPieces; give a list of modules .* gpt2, llama"
    ):
        pieces_of(NoPieces())


def test_a_piece_of_two_submodules_needs_a_function() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def pieces(self) -> list[Piece]:
            return [Piece(("one", "two"))]

    with pytest.raises(ValueError, match="has no function and not one submodule"):
        cut(Two(), [range(1)])
