"""Stage 3 with parameters that get no gradients: adapters beside a frozen model, weights frozen on the way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, Mesh
from shardweave.zero import ZeroOptimizer

WIDTH, LAYERS = 12, 7


class Adapted(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.base(x) + scale * self.up(self.down(x)))


class Stack(nn.Module):
    """``recompute``: how the layers' activations are, if at all; see torch's ``use_reentrant``."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(LAYERS))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return x


class Attention(nn.Module):
    """One function of torch's makes many autograd nodes, in the middle of which weights are read."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)[:, None]
        out: Tensor = self.inside(x, x, x)[0][:, 0]
        return out


class Recurrent(nn.Module):
    """Likewise, a weight for every element of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = (
            nn.Linear(WIDTH, WIDTH),
            nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(self.before(x)[:, None].expand(-1, 3, -1))[0].sum(1)
        return out


class Compiled(nn.Module):
    """Its inside is compiled: nothing in it watches itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.inside.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(self.before(x))
        return out


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


Freeze = Callable[[Any], None]


def trained(
    net: nn.Module, optimizer: Any, batches: Callable[[int], list[Tensor]], freeze: Freeze
) -> list[Tensor]:
    """The parameters after three steps, the first of which trains what ``freeze`` then freezes."""
    for step in range(3):
        for x in batches(step):
            (net(x).square().mean() / len(batches(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            freeze(net)
    return [parameter.detach().clone() for parameter in net.parameters()]


def assert_as_one_process(data: Axis, make: Callable[[], nn.Module], freeze: Freeze, **options: Any) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make().double())
    alone, net = nets
    plain = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    right = trained(alone, plain, lambda step: [batch(rank, step) for rank in range(data.size)], freeze)
    optimizer = ZeroOptimizer(
        net.named_parameters(), torch.optim.SGD, lr=0.1, stage=3, module=net, data=data, **options
    )
    found = trained(net, optimizer, lambda step: [batch(data.rank, step)], freeze)
    for got, expected in zip(found, right, strict=True):
        assert float((got - expected).abs().max()) <= 1e-12


@pytest.mark.parametrize("recompute", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.ranks(2)
def test_a_frozen_model_is_gathered_layer_by_layer_in_the_backward_pass_too(recompute: bool | None) -> None:
    """No gradient tells that a frozen layer was read, so one that had waited for it would stay to the pass' end."""
    data = Mesh(dp=2).data
    bound = 3 * (WIDTH * WIDTH + WIDTH + 4 * WIDTH) + 4  # of seven layers

    assert_as_one_process(
        data, lambda: Stack(recompute), lambda net: None, units=[Adapted], max_live_parameters=bound
    )


@pytest.mark.parametrize("make", [Attention, Recurrent, Compiled])
@pytest.mark.ranks(2)
def test_weights_frozen_on_the_way_are_there_for_every_node_of_a_function(make: type[nn.Module]) -> None:
    """The unit's other gradients may all have arrived before the frozen weight is read."""

    def freeze(net: Any) -> None:
        inside = net.inside
        first = inside[0].parameters() if make is Compiled else [next(inside.parameters())]
        for parameter in first:
            parameter.requires_grad_(False)

    assert_as_one_process(Mesh(dp=2).data, make, freeze, units=["inside"], bucket_mb=1)


class Token:
    """Lives as long as the graph that it is in."""


class Marked(torch.autograd.Function):
    """Its argument, with a token in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[weakref.ref[Token]]) -> Tensor:
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def sharded(net: nn.Module, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        net.named_parameters(), torch.optim.SGD, lr=0.1, stage=3, module=net, data=Mesh(dp=2).data, **options
    )


@pytest.mark.ranks(2)
def test_an_input_that_comes_again_collects_nothing() -> None:
    """A leaf, such as a soft prompt, beside activations: forward passes without a backward pass leave no graph."""
    net = Stack().double()
    optimizer = sharded(net, units=[Adapted])
    x = batch(0, 0)
    alive: list[weakref.ref[Token]] = []
    handle = net.layers[0].register_forward_hook(lambda module, _, out: Marked.apply(out, alive))  # type: ignore[no-untyped-call]
    for _ in range(3):
        net(x)
    assert [token() for token in alive] == [None] * 3
    handle.remove()
    for _ in range(3):
        net(x).sum().backward()
        optimizer.step()
        assert not x._backward_hooks


@pytest.mark.ranks(2)
def test_gradients_of_a_leaf_through_frozen_layers() -> None:
    """As for adversarial inputs; and twice, through one graph, within a bound."""
    alone, net = Stack().double(), Stack().double()
    net.load_state_dict(alone.state_dict())
    bound = (
        3 * (WIDTH * WIDTH + WIDTH) + LAYERS * 4 * WIDTH
    )  # adapters that get no gradient stay to a pass' end
    optimizer = sharded(net, units=[Adapted], max_live_parameters=bound)
    with torch.no_grad(), optimizer.full_parameters():
        for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            theirs.copy_(mine)
    x = batch(0, 0)
    (found,) = torch.autograd.grad(net(x).sum(), x)
    (right,) = torch.autograd.grad(alone(x).sum(), x)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    y = net(x)
    y.sum().backward(retain_graph=True)
    y.mean().backward()
    assert optimizer.live_parameters <= bound


class InPlace(nn.Module):
    """Adds to a part of its input what it has of a frozen bias, as a fused projection's query bias does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH // 2))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        y[:, : WIDTH // 2].mul_(self.bias)
        return torch.tanh(y)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.ranks(2)
def test_weights_that_a_part_of_an_activation_was_multiplied_with_in_place(frozen: bool) -> None:
    """The backward pass comes through the whole activation, not through the part."""

    def freeze(net: Any) -> None:
        for layer in net:
            layer.bias.requires_grad_(not frozen)

    def make() -> nn.Module:
        return nn.Sequential(*(InPlace() for _ in range(5)), nn.Linear(WIDTH, WIDTH))

    def layers(net: Any) -> None:
        freeze(net[:5])

    bound = 3 * (WIDTH * WIDTH + 2 * WIDTH)
    assert_as_one_process(Mesh(dp=2).data, make, layers, units=[InPlace], max_live_parameters=bound)
