"""Streams that are forked off torch's default generator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, Mesh, RandomFork, RandomStreams, all_gather, named_seed


def everywhere(drawn: Tensor, axis: Axis) -> list[list[bool]]:
    """Which ranks drew the same as which."""
    rows = all_gather(drawn.unsqueeze(0), axis)
    return [[torch.equal(left, right) for right in rows] for left in rows]


@pytest.mark.ranks(4)
def test_ranks_draw_apart_or_alike_as_the_stream_says() -> None:
    mesh = Mesh(dp=2, tp=2)
    streams = RandomStreams({"replicated": (mesh.dp,), "split": (mesh.dp, mesh.tp), "same": ()})
    torch.manual_seed(100 + mesh.world.rank)  # whatever was before
    streams.seed(7, "replicated")
    replicas = [[i // 2 == j // 2 for j in range(4)] for i in range(4)]
    apart = [[i == j for j in range(4)] for i in range(4)]
    assert everywhere(torch.rand(5), mesh.world) == replicas
    with streams.use("split"):
        first = torch.rand(5)
        torch.rand(3 + mesh.tp.rank)  # however much is drawn inside
    assert everywhere(first, mesh.world) == apart
    assert everywhere(torch.rand(5), mesh.world) == replicas
    with streams.use("split"):
        assert not torch.equal(torch.rand(5), first)
    streams.seed(7, "same")
    assert everywhere(torch.rand(5), mesh.world) == [[True] * 4] * 4


def test_a_stream_is_restored_with_the_default_generator() -> None:
    streams = RandomStreams({"split": (Axis.single(),)})
    torch.manual_seed(1)
    state = torch.get_rng_state()

    def draw() -> tuple[Tensor, Tensor]:
        with streams.use("split"):
            inside = torch.rand(3)
        return inside, torch.rand(3)

    one = draw()
    torch.set_rng_state(state)  # what a checkpoint saves
    two = draw()
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))
    assert not torch.equal(draw()[0], one[0])


def test_recomputation_draws_the_same_in_every_stream() -> None:
    streams = RandomStreams({"split": (Axis.single(),)})

    def block(x: Tensor) -> Tensor:
        with streams.use("split"):
            x = torch.dropout(x.sin(), 0.5, True)
        return torch.dropout(x.exp(), 0.5, True)

    results = []
    for recompute in (False, True):
        torch.manual_seed(1)
        x = torch.linspace(1, 2, 50).requires_grad_()
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y.sum().backward()
        results.append((y.detach(), x.grad, torch.get_rng_state()))
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_errors_leave_the_default_generator_as_it_was() -> None:
    streams = RandomStreams({"split": (Axis.single(),)})
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="random stream 'spilt' does not exist; there are split"):
        streams.seed(1, "spilt")
    with pytest.raises(ValueError, match="does not exist"), streams.use("other"):
        pass
    after = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), after)
    torch.manual_seed(1)
    with streams.use("split"):
        pass
    behind = torch.get_rng_state()  # the one number that a fork takes
    torch.manual_seed(1)
    with pytest.raises(KeyError):
        _draw_and_fail(streams)
    assert torch.equal(torch.get_rng_state(), behind)
    torch.manual_seed(1)
    fork = streams.fork("split")
    torch.rand(4)
    fork.end()
    fork.end()
    assert torch.equal(torch.get_rng_state(), behind)


def _draw_and_fail(streams: RandomStreams) -> None:
    with streams.use("split"):
        torch.rand(9)
        raise KeyError


def test_a_seeded_fork_draws_from_its_seed_and_leaves_no_trace() -> None:
    torch.manual_seed(3)
    before = torch.rand(2)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), before)
    fork = RandomFork.seeded(5, "stage", 1)
    inside = torch.rand(4)
    fork.end()
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(
        inside, torch.rand(4, generator=torch.Generator().manual_seed(named_seed(5, "stage", 1)))
    )
