"""Stage 3: parameters that are whole only while somebody uses them, against one process that holds them all."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import impatient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, Mesh
from shardweave.comm.testing import RankError, run_ranks
from shardweave.zero import MixedPrecision, ZeroOptimizer

WIDTH, WORDS, LAYERS = 13, 31, 4


class Block(nn.Module):
    """Odd sizes; with ``recompute`` its inside is run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)
        self.recompute: bool | None = None

    def inside(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return x + self.inside(x)
        inside: Tensor = checkpoint(self.inside, x, use_reentrant=self.recompute)
        return x + inside


class Model(nn.Module):
    """A tied embedding that is used outside of its module, a block that runs twice, and one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.order = [*range(LAYERS), 1]

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words)
        for number in self.order:
            x = self.blocks[number](x)
        return F.linear(self.norm(x), self.embedding.weight)


def block_of(net: Model, number: int) -> Block:
    block = net.blocks[number]
    assert isinstance(block, Block)
    return block


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(WORDS, (2, 7), generator=generator)


def loss_of(net: nn.Module, words: Tensor) -> Tensor:
    loss = F.cross_entropy(net(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    return loss


Change = Callable[[Model, int], None]


def leave(net: Model, step: int) -> None:
    pass


def trained_alone(ranks: int, *, steps: int, micros: int, change: Change) -> list[Tensor]:
    """What one process makes of the batches of all ranks."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        change(net, step)
        for rank in range(ranks):
            for micro in range(micros):
                (loss_of(net, batch(rank, step, micro)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def optimizer_of(net: nn.Module, data: Axis, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        net.named_parameters(), torch.optim.AdamW, lr=1e-2, stage=3, module=net, data=data, **options
    )


def trained(
    data: Axis, *, steps: int = 3, micros: int = 1, change: Change = leave, **options: Any
) -> tuple[list[Tensor], int]:
    """The parameters after some steps on this rank's batches, and the most elements that were gathered at once."""
    net = model()
    optimizer = optimizer_of(net, data, **options)
    live = [0]

    def look(*_: Any) -> None:
        live.append(optimizer.live_parameters)

    def look_in_backward(module: nn.Module, _: Any, out: Tensor) -> None:
        look()
        if out.requires_grad:
            out.register_hook(look)

    for module in net.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look_in_backward)
    for step in range(steps):
        change(net, step)
        for micro in range(micros):
            with optimizer.accumulate() if micro < micros - 1 else nullcontext():
                loss_of(net, batch(data.rank, step, micro)).backward()
        optimizer.step()
    with optimizer.full_parameters():
        found = [parameter.detach().clone() for parameter in net.parameters()]
    return found, max(live)


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, right in zip(found, expected, strict=True):
        assert float((got - right).abs().max()) <= 1e-12 * float(right.abs().max())


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no prefetch": {"prefetch": 0},
    "far prefetch": {"prefetch": 3},
    "all kept": {"keep_gathered": 10**6},
    "some kept": {"keep_gathered": 2500, "max_live_parameters": 3000},
    "small ones persistent": {"persistent_parameters": 500},
    "bound": {"max_live_parameters": 1980, "prefetch": 2},
    "by class": {"units": [Block]},
    "by name and module": {"units": ["blocks.0", "embedding"]},
    "by layer": {"units": [nn.Linear, nn.LayerNorm]},
    "small units": {"bucket_mb": 0.001},
    "micro-batches": {"micros": 3},
    "micro-batches whole": {"micros": 3, "shard_between_micro_batches": False},
    "micro-batches kept": {"micros": 3, "shard_between_micro_batches": False, "keep_gathered": 10**6},
}


def every_variant() -> None:
    data = Mesh(dp=torch.distributed.get_world_size()).data
    right = {micros: trained_alone(data.size, steps=3, micros=micros, change=leave) for micros in (1, 3)}
    for name, options in VARIANTS.items():
        found, live = trained(data, **options)
        check(found, right[options.get("micros", 1)])
        assert live <= options.get("max_live_parameters", live), name
        if name == "default":  # the tied embedding, the block that ran twice, another one and the next
            assert live <= 404 + 3 * 768 + 2 * data.size


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_way_of_gathering_is_the_same_training(ranks: int) -> None:
    run_ranks(every_variant, ranks)


def other_orders(net: Model, step: int) -> None:
    """Other layers in another order in each step."""
    net.order = [[0, 1, 2, 3], [3, 1, 1, 0], [2], [3, 2, 1, 0]][step]


def recomputed(reentrant: bool) -> Change:
    def change(net: Model, step: int) -> None:
        for number in range(LAYERS):
            block_of(net, number).recompute = reentrant

    return change


@pytest.mark.ranks(2)
def test_the_order_may_change_from_step_to_step() -> None:
    data = Mesh(dp=2).data
    right = trained_alone(2, steps=4, micros=1, change=other_orders)
    for options in ({}, {"prefetch": 2, "keep_gathered": 1500}, {"max_live_parameters": 1980}):
        check(trained(data, steps=4, change=other_orders, **options)[0], right)


@pytest.mark.ranks(2)
def test_recomputed_activations() -> None:
    data = Mesh(dp=2).data
    right = trained_alone(2, steps=3, micros=2, change=leave)
    for reentrant in (False, True):
        for options in ({}, {"max_live_parameters": 1980, "prefetch": 2}):
            check(trained(data, micros=2, change=recomputed(reentrant), **options)[0], right)


class Odd(nn.Module):
    """Parameters that are read in ways that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)
        self.recurrent = nn.LSTM(9, 9, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(9, 9))
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.a.weight.t() @ self.b.weight)  # of two modules that do not run
        x = x + self.b(x)
        x = x + F.linear(x, self.b.weight.detach(), self.c.bias)  # no gradient through it
        x = x + self.attention(x, x, x)[0] + self.recurrent(x)[0] + self.normed(x)
        first, second = self.c.weight.chunk(2)  # views, used later
        x = torch.cat([F.linear(x, first), F.linear(x, second)], -1) * self.a.bias
        self.penalty = self.a.bias.square().sum() * 0.1  # beside the output
        return x


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd().double()


def odd_loss(net: Odd, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean() + net.penalty
    together = torch.cat([net.a.weight, net.c.weight])  # outside of any forward, of two units at once
    return loss + together.square().mean() + sum(p.square().sum() for p in net.parameters()) * 1e-3


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)


@pytest.mark.ranks(2)
def test_parameters_read_where_no_module_announces_it() -> None:
    data = Mesh(dp=2).data
    alone, net = odd(), odd()
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for options in ({}, {"units": [nn.Linear, nn.LSTM], "prefetch": 0}):
        net, alone = odd(), odd()
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        optimizer = optimizer_of(net, data, **options)
        for step in range(3):
            for rank in range(2):
                (odd_loss(alone, inputs(rank, step)) / 2).backward()
            plain.step()
            plain.zero_grad()
            odd_loss(net, inputs(data.rank, step)).backward()
            optimizer.step()
            assert optimizer.live_parameters == 0
        with torch.no_grad():
            net(inputs(0, 9))
        assert optimizer.live_parameters == 0
        with optimizer.full_parameters():
            check([p.detach() for p in net.parameters()], [p.detach() for p in alone.parameters()])
            assert str(net.a.weight).startswith("Parameter(sharded, (9, 9)")


@pytest.mark.ranks(3)
def test_bytes_of_stage_three() -> None:
    """A gather for each pass and a reduction; once a step where parameters, or gradients too, are kept.

    The last unit of a forward pass is the first of the backward pass and stays, once it is known that one follows.
    """
    mesh = Mesh(dp=3)
    k = 4
    for options, gathers, reductions in (
        ({}, 2 * k - k / 5, k),
        ({"shard_between_micro_batches": False}, 2 * k - k / 5, 1),
        ({"keep_gathered": 10**6}, 1, k),
        ({"keep_gathered": 10**6, "shard_between_micro_batches": False}, 1, 1),
        ({"persistent_parameters": 10**6}, 1, k),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(11, 11).double() for _ in range(5)))
        optimizer = optimizer_of(net, mesh.data, **options)
        padded = sum(unit.length for unit in optimizer.units)
        assert len(optimizer.units) == 5
        for step in range(3):
            mesh.ledger.reset()
            for micro in range(k):
                with optimizer.accumulate() if micro < k - 1 else nullcontext():
                    net(torch.randn(3, 11, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            gather = mesh.ledger.total("data", "all_gather")
            scatter = mesh.ledger.total("data", "reduce_scatter")
            known = round(gathers * padded) + (padded // 5 if step == 0 and gathers > 1 else 0)
            assert (gather.elements, scatter.elements) == (known, reductions * padded), options
            assert gather.sent + scatter.sent == (known + reductions * padded) * 8 * 2 // 3, step


@pytest.mark.ranks(2)
def test_what_somebody_writes_stays() -> None:
    """By ``load_state_dict``, through ``.data`` and in the context; with and without masters."""
    data = Mesh(dp=2).data
    for precision in (None, MixedPrecision(parameters=torch.bfloat16)):
        net = model().float()
        optimizer = optimizer_of(net, data, precision=precision)
        state = {name: torch.full_like(value, 3.0) for name, value in model().float().state_dict().items()}
        net.load_state_dict(state)
        up = block_of(net, 1).up
        up.weight.data.mul_(2)
        up.bias.data[3] = 7
        with torch.no_grad():
            net.norm.weight.fill_(5)
            with optimizer.full_parameters(net.unused):
                net.unused.bias.add_(1)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        loss_of(net, batch(data.rank, 0)).backward()
        optimizer.step()
        state["blocks.1.up.weight"] *= 2
        state["blocks.1.up.bias"][3] = 7
        state["norm.weight"].fill_(5)
        state["unused.bias"] += 1
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter.detach().float(), state[name]), name
        for piece in optimizer.pieces():
            assert piece.values.dtype == torch.float32
            right = state[piece.name].flatten()[piece.begin : piece.begin + piece.values.numel()]
            assert torch.equal(piece.values, right)


@pytest.mark.ranks(2)
def test_a_copy_of_the_module_is_whole_and_plain() -> None:
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data)
    copied = copy.deepcopy(net)
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    check([p.detach() for p in copied.parameters()], [p.detach() for p in model().parameters()])
    with optimizer.full_parameters():
        state = {name: value.clone() for name, value in net.state_dict().items()}
    check(list(state.values()), list(model().state_dict().values()))


@pytest.mark.ranks(2)
def test_a_bound_that_cannot_be_kept_is_refused() -> None:
    data = Mesh(dp=2).data
    with pytest.raises(ValueError, match="max_live_parameters=100: embedding has 404 elements"):
        optimizer_of(model(), data, max_live_parameters=100)
    first, second = nn.Linear(9, 9).double(), nn.Linear(9, 9).double()
    pair = nn.Sequential(first, second)
    optimizer = optimizer_of(pair, data, max_live_parameters=150, keep_gathered=10**6)
    with pytest.raises(RuntimeError, match=r"1 is needed while 0 are in use, which takes 180"):
        torch.cat([first.weight, second.weight])
    assert optimizer.live_parameters <= 150
    with optimizer.full_parameters():
        assert optimizer.live_parameters == 180
    assert optimizer.live_parameters <= 150  # what may be kept is not above it either
    with pytest.raises(ValueError, match="give the module they are in, module=model"):
        ZeroOptimizer(model().parameters(), torch.optim.AdamW, stage=3, data=data)
    with pytest.raises(ValueError, match=r"units: blocks\.9 is no module of Model"):
        optimizer_of(model(), data, units=["blocks.9"])
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        optimizer_of(model(), data, units=["blocks"])
    with pytest.raises(ValueError, match="have no effect with stage=2"):
        ZeroOptimizer(model().parameters(), torch.optim.AdamW, stage=2, data=data, prefetch=2)


@pytest.mark.ranks(2)
def test_step_inside_the_context_is_refused() -> None:
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data)
    with optimizer.full_parameters():
        loss_of(net, batch(data.rank, 0)).backward()
        with pytest.raises(RuntimeError, match="step inside full_parameters"):
            optimizer.step()
    optimizer.step()
    assert optimizer.live_parameters == 0


@pytest.mark.ranks(2)
def test_after_exceptions_nothing_stays_gathered() -> None:
    data = Mesh(dp=2).data
    net, fails = model(), [True]
    optimizer = optimizer_of(net, data)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            if fails[0]:
                raise ArithmeticError
            return dy

    handle = block_of(net, 2).up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(batch(0, 0))
    assert optimizer.live_parameters == 0
    handle.remove()
    block_of(net, 2).up.register_forward_hook(lambda module, _, out: Failing.apply(out))  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        loss_of(net, batch(data.rank, 0)).backward()
    fails[0] = False
    optimizer.zero_grad()
    right = trained_alone(2, steps=1, micros=1, change=leave)
    loss_of(net, batch(data.rank, 0)).backward()
    assert optimizer.live_parameters == 0
    optimizer.step()
    with optimizer.full_parameters():
        check([p.detach() for p in net.parameters()], right)


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (
            ([0, 1], [0, 2]),
            "rank 1 is about to gather blocks.2 after blocks.0, and rank 0 to gather embedding after blocks.1",
        ),
        (
            ([0, 1, 2, 3, 1], [0, 2, 3]),
            "rank 1 is about to gather blocks.2 after blocks.0, and rank 0 to gather blocks.2 after blocks.1",
        ),
        (
            ([0, 1, 2, 3, 1], [0, 1, 2]),
            "rank 1 is about to gather embedding after blocks.2, and rank 0 to gather blocks.1 after blocks.3",
        ),
    ],
)
def test_ranks_that_part_are_told_so(orders: tuple[list[int], list[int]], words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match=words):
        run_ranks(part, 2, orders)
    assert time.monotonic() - begun < 30


def part(orders: tuple[list[int], list[int]]) -> None:
    impatient()
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data)
    for step in range(2):
        loss_of(net, batch(data.rank, step)).backward()
        optimizer.step()
    net.order = orders[data.rank]
    loss_of(net, batch(data.rank, 2)).backward()


def part_where_all_is_there(kind: str, prefetch: int) -> None:
    """In what is live already, where nothing would be asked for its own sake."""
    impatient()
    data = Mesh(dp=2).data
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    optimizer = optimizer_of(net, data, units=[nn.Linear], prefetch=prefetch)
    x = torch.ones(2, 6, dtype=torch.float64)

    def step(between: Callable[[Tensor], object]) -> None:
        loss = net(x).square().mean()
        between(x)
        loss.backward()
        optimizer.step()

    def nothing(x: Tensor) -> None:
        pass

    @torch.no_grad()
    def some(x: Tensor) -> None:
        net[3](x), net[1](x)

    for between in (nothing, some, nothing, some):
        step(between)
    if kind == "units":
        step(some if data.rank else nothing)
    elif kind == "context":
        with optimizer.full_parameters(net[1 + data.rank]):
            pass
    elif kind == "step":
        net(x).square().mean().backward()
        if data.rank:
            some(x)
        optimizer.step()
    else:
        with torch.set_grad_enabled(data.rank == 0):
            net(x)
        step(nothing)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("units", "3 in a backward pass after 3"),
        ("recording", "0, without gradients, after the last reduction"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_ranks_that_part_in_what_is_gathered_already_are_told_so(
    kind: str, words: str, prefetch: int
) -> None:
    """Otherwise units of one size are mixed up, and nobody notices."""
    with pytest.raises(RankError, match=words):
        run_ranks(part_where_all_is_there, 2, kind, prefetch)


@pytest.mark.ranks(2)
def test_one_rank_alone_may_read_what_is_always_there() -> None:
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data, units=[nn.LayerNorm, Block], persistent_parameters=2 * WIDTH)
    right = trained_alone(2, steps=3, micros=1, change=leave)
    for step in range(3):
        loss = loss_of(net, batch(data.rank, step))
        penalty = block_of(net, 2).up.weight.square().sum() * 0  # a unit that no module uses now
        if data.is_first:
            assert net.norm.weight.mean().item() > 0
        penalty = penalty + block_of(net, 2).up.weight.square().sum() * 0
        (loss + penalty).backward()
        optimizer.step()
    with optimizer.full_parameters():
        check([p.detach() for p in net.parameters()], right)


@pytest.mark.ranks(2)
def test_a_skipped_step_releases_what_waits_for_a_backward_pass() -> None:
    """As one that is taken does; the pass may come all the same."""
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data, units=[nn.LayerNorm, Block], persistent_parameters=2 * WIDTH)
    always = sum(unit.length for unit in optimizer.units if unit.length <= 2 * WIDTH)
    for step in range(3):
        loss = loss_of(net, batch(data.rank, step))
        if step == 2:
            assert optimizer.live_parameters > always
            (net.norm.weight.sum() * float("nan")).backward()
            optimizer.step()
            assert optimizer.step_skipped
            assert optimizer.live_parameters == always
        loss.backward()
        optimizer.step()
        assert optimizer.live_parameters == always
    with optimizer.full_parameters():
        check([p.detach() for p in net.parameters()], trained_alone(2, steps=3, micros=1, change=leave))


@pytest.mark.ranks(2)
def test_gradients_of_gradients() -> None:
    """A penalty on the input's gradient, whose graph reads the weights once more."""
    data = Mesh(dp=2).data

    def penalised(net: Odd, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(odd_loss(net, x), [x], create_graph=True)
        return odd_loss(net, x) + dx.square().sum()

    for options in ({}, {"prefetch": 2, "units": [nn.Linear]}):
        net, alone = odd(), odd()
        for one in (net, alone):
            one.recurrent = nn.Identity()  # type: ignore[assignment] # of an LSTM torch has no second derivative
            one.forward = partial(without_attention, one)  # type: ignore[method-assign]
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        optimizer = optimizer_of(net, data, **options)
        for step in range(3):
            for rank in range(2):
                (penalised(alone, inputs(rank, step)) / 2).backward()
            plain.step()
            plain.zero_grad()
            penalised(net, inputs(data.rank, step)).backward()
            optimizer.step()
            assert optimizer.live_parameters == 0
        with optimizer.full_parameters():
            check([p.detach() for p in net.parameters()], [p.detach() for p in alone.parameters()])


@pytest.mark.ranks(2)
def test_zeros_for_parameters_that_a_loss_does_not_need() -> None:
    """``torch.autograd.grad(materialize_grads=True)``, of parameters, of one alone, and by position."""
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data)
    weights = [block.get_parameter("up.weight") for block in net.blocks]
    shape = weights[0].shape
    for given in (weights, weights[:1], weights[0]):
        found = torch.autograd.grad(weights[1].square().sum() * 0.5, given, materialize_grads=True)
        assert torch.equal(found[0], torch.zeros(shape, dtype=found[0].dtype))
        assert type(found[0]) is Tensor
        assert len(found) == 1 or torch.equal(found[1], weights[1].detach())
    asked = (net.norm.weight.sum(), weights[0], None, None, True, True, None, False, True)
    (zeros,) = torch.autograd.grad(*asked)
    assert zeros.requires_grad
    assert not zeros.any()
    with pytest.raises(RuntimeError, match="used in the graph"):
        torch.autograd.grad(net.norm.weight.sum(), weights[0])
    assert optimizer.stage == 3


def without_attention(net: Odd, x: Tensor) -> Tensor:
    net.penalty = net.c.weight.square().sum()
    out: Tensor = torch.tanh(net.normed(torch.tanh(net.b(torch.tanh(net.a(x))))))
    return out


@pytest.mark.ranks(2)
def test_memory_that_others_are_given_and_modules_that_are_saved() -> None:
    data = Mesh(dp=2).data
    net = model()
    right = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = optimizer_of(net, data)
    arrays = [parameter.detach().numpy() for parameter in net.parameters()]
    check([torch.from_numpy(array) for array in arrays], right)
    copied = copy.deepcopy(net)
    saved = pickle.loads(pickle.dumps(net))  # noqa: S301 # what this test wrote itself
    assert optimizer.live_parameters <= 768
    optimizer._holdings.gathered.residency.forget()  # type: ignore[union-attr]
    for other in (copied, saved):
        other(batch(0, 0))  # on its own parameters
        assert optimizer.live_parameters == 0
        check([parameter.detach() for parameter in other.parameters()], right)
    del optimizer
    again = optimizer_of(net, data)
    loss_of(net, batch(data.rank, 0)).backward()
    again.step()
    assert again.live_parameters == 0
    with again.full_parameters():
        check([p.detach() for p in net.parameters()], trained_alone(2, steps=1, micros=1, change=leave))


@pytest.mark.ranks(2)
def test_a_hook_that_fails_before_ours() -> None:
    data = Mesh(dp=2).data
    net = model()
    optimizer = optimizer_of(net, data)
    handle = net.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        net(batch(0, 0))
    handle.remove()
    assert optimizer.live_parameters == 0
    with torch.no_grad():
        for row in net.norm.weight.unsqueeze(0):  # a view of a view, which torch lets one write to
            row.mul_(1)
    loss_of(net, batch(data.rank, 0)).backward()
    optimizer.step()
    with optimizer.full_parameters():
        check([p.detach() for p in net.parameters()], trained_alone(2, steps=1, micros=1, change=leave))
