"""The backward in two halves by torch's graph: what is put off, that it is exact, and when gradients are final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from packages.pipeline.tests.together import Together
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, WeightGradients, gradient_work
from shardweave.pipeline import Action, Pipeline, Schedule
from shardweave.pipeline.split import backward_of_inputs

WIDTH = 6


class Products(nn.Module):
    """A parameter of its own as either factor, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(WIDTH, WIDTH)))
        self.twice, self.once = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(torch.tanh(self.left @ x @ self.right))
        result: Tensor = self.once(self.twice(h))
        return result


class SameMemory(nn.Module):
    """A bias without a sum: its gradient is what arrives, which a second product is given too."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, WIDTH))
        self.one, self.two = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x[0], self.one) + torch.mm(x[1], self.two)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outside(checkpoint(self._run, x, use_reentrant=False))
        return result

    def _run(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.inside(x))


class Tokens(nn.Module):
    """Takes nothing that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.embedding((x.detach() * 10).long().abs() % 5))
        return result


class Offering(torch.autograd.Function):
    """A product with a queue of its own, as in tensor_parallel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        found = x.flatten(0, -2).t() @ gradient.flatten(0, -2)
        queue = gradient_work(weight).queue
        if queue is None:
            return gradient @ weight.detach().t(), found

        def add() -> None:
            weight.grad = found if weight.grad is None else weight.grad + found

        queue.put([weight], add)
        return gradient @ weight.detach().t(), None


class Offers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(Offering.apply(x, self.weight))  # type: ignore[no-untyped-call]
        return result


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, WIDTH, bias=False))


def compiled() -> nn.Module:
    return cast(nn.Module, torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager"))


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    # what is put off, by name
    "mlp": (mlp, {"0.weight", "0.bias", "3.weight"}),
    "attention": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True),
        {f"{name}.{part}" for name in ("self_attn.out_proj", "linear1", "linear2") for part in ("weight", "bias")}
        | {"self_attn.in_proj_weight"},
    ),
    "convolution": (lambda: nn.Conv1d(4, 4, 3, padding=1), {"weight", "bias"}),
    "products": (Products, {"left", "right", "once.weight", "once.bias"}),
    "same memory": (SameMemory, {"bias", "one", "two"}),
    "checkpointed": (Checkpointed, {"outside.weight", "outside.bias"}),
    "tokens": (Tokens, {"embedding.weight", "linear.weight", "linear.bias"}),
    "parametrized": (lambda: weight_norm(nn.Linear(WIDTH, WIDTH)), {"bias"}),
    "compiled": (compiled, set()),
    "a queue of its own": (Offers, {"weight", "linear.weight", "linear.bias"}),
    "nothing to put off": (lambda: nn.LayerNorm(WIDTH), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_two_halves_are_the_backward(name: str) -> None:
    torch.manual_seed(0)
    make, put_off = CASES[name]
    module = make().double()
    named = dict(module.named_parameters())
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    sums = [torch.zeros_like(its) for its in (x, *named.values())]
    told: list[str] = []
    for key, parameter in named.items():
        gradient_work(parameter).subscribe(parameter, lambda parameter, key=key: told.append(key))  # type: ignore[misc]
    for _ in range(2):
        output = module(x)
        gradient = torch.randn_like(output)
        right = torch.autograd.grad(output, [x, *named.values()], gradient, allow_unused=True)
        sums = [total if its is None else total + its for total, its in zip(sums, right, strict=True)]
        output, queue = module(x), WeightGradients()
        for parameter in named.values():
            gradient_work(parameter).queue = queue
        told.clear()
        backward_of_inputs([get_gradient_edge(output)], [gradient], set(map(id, named.values())), queue)
        for parameter in named.values():
            gradient_work(parameter).queue = None
        assert {key for key, its in named.items() if gradient_work(its).deferred} == put_off
        assert sorted(told) == sorted(set(named) - put_off)
        queue.run()
        assert sorted(told) == sorted(named)  # each once
    for total, its in zip(sums, (x, *named.values()), strict=True):
        if its.grad is not None:
            torch.testing.assert_close(its.grad, total, rtol=1e-13, atol=1e-13)
        else:
            assert not total.any()


def first_half(module: nn.Module, output: Tensor, queue: WeightGradients) -> None:
    """From the output itself."""
    backward_of_inputs(
        [get_gradient_edge(output)], [output.detach()], set(map(id, module.parameters())), queue
    )


def in_halves(module: nn.Module, x: Tensor) -> None:
    """Both halves of one backward, from the output itself."""
    output, queue = module(x), WeightGradients()
    first_half(module, output, queue)
    queue.run()


def test_what_is_checkpointed_is_recomputed_once() -> None:
    module = Checkpointed()
    in_halves(module, torch.randn(2, WIDTH, requires_grad=True))
    assert module.calls == 2


class Reentrant(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outside(checkpoint(self._run, x, use_reentrant=True))
        return result


def test_a_reentrant_checkpoint_has_a_whole_backward() -> None:
    one, other = Reentrant(), Reentrant()
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, WIDTH, requires_grad=True)
    in_halves(one, x)
    (other(x).square() / 2).sum().backward()
    torch.testing.assert_close([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])
    assert one.calls == 2


def test_hooks_behind_accumulation_see_every_gradient() -> None:
    """An optimizer in the backward pass: its parameter is not put off, others are."""
    linear, seen = nn.Linear(WIDTH, WIDTH), []
    for parameter in linear.parameters():
        gradient_work(parameter).subscribe(parameter, lambda parameter: None)  # which is no hook of others
    linear.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    output, queue = linear(torch.randn(2, WIDTH)), WeightGradients()
    first_half(linear, output, queue)
    assert len(seen) == 1
    assert gradient_work(linear.bias).deferred
    queue.run()
    assert len(seen) == 1


def test_a_hook_that_changes_a_gradient_changes_it_once() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    x, queue = torch.randn(2, WIDTH), WeightGradients()
    output = linear(x)
    output.register_hook(lambda gradient: 2 * gradient)
    backward_of_inputs(
        [get_gradient_edge(output)], [torch.ones_like(output)], set(map(id, linear.parameters())), queue
    )
    queue.run()
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad, 2 * x.sum(0).expand(WIDTH, WIDTH))


class Failing(nn.Module):
    """Raises in the backward of its second micro-batch, behind a product that is put off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        self.calls += 1
        if self.calls == 2:
            hidden.register_hook(self.fail)
        return self.second(hidden).sum()  # type: ignore[no-any-return]

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")


def test_after_a_failed_step_nothing_is_owed() -> None:
    actions = tuple(map(Action.parse, ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]))
    plan = Schedule("test", 1, 2, (0,), (actions,))
    module = Failing()
    pipeline = Pipeline([module], Axis.single("pp"), plan)
    inputs = [torch.ones(1, 2), torch.ones(1, 2)]
    with pytest.raises(ArithmeticError):
        pipeline.step(inputs)
    assert all(gradient_work(parameter).final for parameter in module.parameters())
    told: list[Tensor] = []
    for parameter in module.parameters():
        gradient_work(parameter).subscribe(parameter, told.append)
    pipeline.step(inputs)
    assert len(told) == 4
    with pytest.raises(ValueError, match="split is 'both'; choose one of 'graph', 'layers', 'none'"):
        Pipeline([module], Axis.single("pp"), plan, split="both")  # type: ignore[arg-type]


def test_a_parameter_of_two_stages_is_final_once_with_both_halves() -> None:
    """As an embedding that is the head as well, on the rank with the first and the last stage of a V."""
    rows = (
        "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0W0 0I1 0W1 3W1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 1W1 2W1",
    )
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    plan = Schedule("test", 4, 2, (0, 1, 1, 0), actions)
    modules = [nn.Linear(3, 3).double() for _ in range(4)]
    modules[3].weight = modules[0].weight
    told: list[Tensor] = []

    def tell(parameter: Tensor) -> None:
        assert parameter.grad is not None
        told.append(parameter.grad.clone())

    gradient_work(modules[0].weight).subscribe(modules[0].weight, tell)
    inputs = [torch.randn(2, 3).double() for _ in range(2)]
    Together(plan, modules, loss=lambda output, target: output.square().sum()).step(inputs, [None, None])
    assert len(told) == 1
    found, modules[0].weight.grad = modules[0].weight.grad, None
    for x in inputs:
        nn.Sequential(*modules)(x).square().sum().backward()
    torch.testing.assert_close(told[0], modules[0].weight.grad)
    torch.testing.assert_close(found, modules[0].weight.grad)
