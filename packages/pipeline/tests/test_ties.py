"""Parameters shared by several pipeline ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, sharding_of
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import Pipeline, schedule, tie

VOCAB, WIDTH = 7, 4


class Shared(nn.Module):
    """An embedding with a norm behind it, used for tokens at the first stage and for logits at the last."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(
            torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        )
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.norm(nn.functional.embedding(tokens, self.weight))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(hidden), self.weight)


class Middle(nn.Linear):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__(WIDTH, WIDTH, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


class First(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared, self.middle = Shared(dtype, 1), Middle(dtype, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.middle(self.shared.embed(tokens)))


class Last(nn.Module):
    def __init__(self, dtype: torch.dtype, shared: Shared | None = None) -> None:
        super().__init__()
        # A copy with other values: tie() has to make them equal.
        self.middle, self.shared = Middle(dtype, 3), shared or Shared(dtype, 99)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.shared.logits(torch.tanh(self.middle(hidden)))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def tokens(step: int, count: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(VOCAB, (2, 2, 5), generator=generator) for _ in range(count)]
    return [row[0] for row in rows], [row[1] for row in rows]


class Reference:
    """The same model in one process, where a tied parameter is one object."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.first = First(dtype)
        self.last = Last(dtype, self.first.shared)
        self.parameters = list(dict.fromkeys([*self.first.parameters(), *self.last.parameters()]))
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.05)

    def step(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for x, target in zip(inputs, targets, strict=True):
            loss = cross_entropy(self.last(self.first(x)), target)
            loss.backward()
            total = total + loss.detach()
        norm = torch.stack([p.grad.norm() for p in self.parameters if p.grad is not None]).norm()
        self.optimizer.step()
        return total, norm


class Tied:
    """One rank's half on a pipeline of two."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.module = First(dtype) if mesh.pp.is_first else Last(dtype)
        tie(self.module.shared, mesh.pp, [0, 1])
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.05)
        plan = schedule("1f1b", stages=2, micro_batches=3)
        self.pipeline = Pipeline([self.module], mesh.pp, plan, loss=cross_entropy)

    def step(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor | None, Tensor]:
        self.optimizer.zero_grad()
        total = self.pipeline.step(inputs, targets)
        comm.sum_partial_gradients(self.parameters)
        norm = comm.gradient_norm(self.parameters, self.mesh.model)
        self.optimizer.step()
        return total, norm

    def check_copies(self) -> None:
        """The copies of both ranks are equal bit by bit."""
        flat = torch.cat([p.detach().flatten() for p in self.module.shared.parameters()])
        first, last = comm.all_gather(flat[None], self.mesh.pp)
        assert torch.equal(first, last)


@pytest.mark.ranks(2)
def test_a_tied_block_trains_as_in_one_process() -> None:
    mesh = Mesh(pp=2)
    tied, reference = Tied(mesh, torch.float64), Reference(torch.float64)
    tied.check_copies()
    for step in range(4):
        total, norm = tied.step(*tokens(step))
        expected, expected_norm = reference.step(*tokens(step))
        torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
        if mesh.pp.is_last:
            assert total is not None
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=0, check_dtype=False)
        tied.check_copies()
    theirs = reference.first if mesh.pp.is_first else reference.last
    for mine, its in zip(tied.parameters, theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


State = tuple[Mapping[str, Tensor], Mapping[str, object]]


def train(first: int, last: int, state: list[State] | None) -> tuple[State, list[float | None]]:
    """Steps first..last - 1 in fp32; from a state if one is given. Returns the state and the losses."""
    tied = Tied(Mesh(pp=2), torch.float32)
    if state is not None:
        model, optimizer = state[tied.mesh.pp.rank]
        tied.module.load_state_dict(model)
        tied.optimizer.load_state_dict(dict(optimizer))
    losses = []
    for step in range(first, last):
        total, _ = tied.step(*tokens(step))
        tied.check_copies()
        losses.append(None if total is None else float(total))
    return (tied.module.state_dict(), tied.optimizer.state_dict()), losses


def test_b009_copies_of_a_tied_block_stay_equal_bit_by_bit_also_after_a_restart() -> None:
    whole = run_ranks(train, 2, 0, 4, None)
    before = run_ranks(train, 2, 0, 3, None)
    after = run_ranks(train, 2, 3, 4, [state for state, _ in before])  # fresh processes
    assert after[1][1][0] == whole[1][1][3]
    assert after[0][1] == [None]


class Forced(nn.Module):
    """A part whose gradients are what the test says."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros_like(gradient))
        self.other = nn.Parameter(torch.zeros(3, dtype=gradient.dtype))
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + (self.embedding * self.gradient).sum() + 0 * self.other.sum()


@pytest.mark.ranks(2)
def test_b003_a_tied_embedding_is_counted_once_in_the_norm() -> None:
    mesh = Mesh(pp=2)
    # Of the combined gradient (20, 20), with squared norm 800, each stage contributes a part.
    part = [torch.tensor([5.0, 19.0]), torch.tensor([15.0, 1.0])][mesh.pp.rank].double()
    module = Forced(part)
    tie(module.embedding, mesh.pp, [0, 1])
    pipeline = Pipeline([module], mesh.pp, schedule("1f1b", stages=2, micro_batches=1))
    pipeline.step([torch.zeros(1, dtype=torch.float64)])
    parameters = list(module.parameters())
    comm.sum_partial_gradients(parameters)
    norm = comm.gradient_norm(parameters, mesh.model)
    assert float(norm) == pytest.approx(800**0.5, rel=1e-15)


@pytest.mark.ranks(4)
def test_the_record_of_a_tie() -> None:
    mesh = Mesh(pp=4)
    weight = nn.Parameter(torch.full((2, 3), float(mesh.pp.rank)))
    comm.set_sharding(weight, comm.Sharding("embedding.weight", (2, 3), partial=(mesh.tp,)))
    if mesh.pp.rank in (1, 3):
        tie([weight], mesh.pp, [3, 1])
        tie([weight], mesh.pp, [3, 1])  # twice is once
        shared = mesh.pp.subset([1, 3])
        assert shared is not None
        assert sharding_of(weight) == comm.Sharding(
            "embedding.weight", (2, 3), partial=(mesh.tp, shared), exclusive=(mesh.pp,), tied=shared
        )
        assert torch.equal(weight, torch.ones(2, 3))  # the values of the first
    else:
        with pytest.raises(ValueError, match=r"rank \d of axis 'pp' holds none of the stages \[3, 1\]"):
            tie(weight, mesh.pp, [3, 1])
    Pipeline([nn.ParameterList([weight])], mesh.pp, schedule("1f1b", stages=4, micro_batches=1))
    assert sharding_of(weight).exclusive == (mesh.pp,)
    assert comm.counts_here(weight, mesh.model) == (mesh.pp.rank != 3)


@pytest.mark.ranks(2)
def test_stages_on_one_rank_share_the_parameter_itself() -> None:
    mesh = Mesh(pp=2)
    weight = nn.Parameter(torch.ones(2))
    if mesh.pp.is_first:
        tie(weight, mesh.pp, [0, 3], rank_of_stage=(0, 1, 1, 0))
        assert sharding_of(weight) == comm.Sharding("", (2,), exclusive=(mesh.pp,))


def test_a_tie_on_one_rank_is_no_tie() -> None:
    weight = nn.Parameter(torch.ones(2))
    tie(weight, Axis.single("pp"), [0])
    assert sharding_of(weight).tied is None


@pytest.mark.ranks(2)
def test_parameters_on_the_meta_device_can_be_tied() -> None:
    mesh = Mesh(pp=2)
    weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    tie(weight, mesh.pp, [0, 1])
    assert sharding_of(weight).tied == mesh.pp


@pytest.mark.ranks(2)
def test_copies_of_different_shapes_are_refused_on_all_ranks() -> None:
    mesh = Mesh(pp=2)
    with pytest.raises(ValueError, match=r"copies differ in shape: \[\(2, 3\)\] .* and \[\(3, 3\)\]"):
        tie(nn.Parameter(torch.ones(2 + mesh.pp.rank, 3)), mesh.pp, [0, 1])
    with pytest.raises(ValueError, match="others do not"):
        tie([nn.Parameter(torch.ones(2))] * (1 + mesh.pp.rank), mesh.pp, [0, 1])


@pytest.mark.parametrize("stages", [[], [0, 2], [-1]])
def test_stages_that_are_not_there_are_refused(stages: list[int]) -> None:
    with pytest.raises(ValueError, match="name stages from 0 to 0"):
        tie(nn.Parameter(torch.ones(2)), Axis.single("pp"), stages)
