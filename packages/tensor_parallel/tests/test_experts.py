"""Mixtures of experts: against a loop over tokens, and on several ranks against one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import F64, assert_near, part, values
from torch import Tensor

from shardweave.comm import (
    Axis,
    Mesh,
    WeightGradients,
    all_gather,
    all_reduce,
    full_index,
    gradient_work,
    sharding_of,
)
from shardweave.tensor_parallel import (
    MixtureOfExperts,
    Routed,
    TopKRouter,
    balance_loss,
    cut_context,
    router_z_loss,
    within_capacity,
)

HIDDEN, FFN, EXPERTS, K = 6, 7, 4, 2
LENGTH, BATCH = 8, 3


def mixture(mesh: Mesh | None = None, *, context: Axis | None = None, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(4)
    axes: dict[str, Any] = {}
    if mesh is not None:
        axes = {"ep": mesh.ep, "reduced": mesh.expert_data, "tp": mesh.tp, "context": context}
    return MixtureOfExperts(HIDDEN, FFN, EXPERTS, K, dtype=F64, **axes, **options)


def by_hand(net: MixtureOfExperts, x: Tensor, room: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token: the output, the balance loss and the z-loss."""
    s, b, _ = x.shape
    y = torch.zeros_like(x)
    balance, z = x.new_zeros(()), x.new_zeros(())
    for sequence in range(b):
        taken = [0] * EXPERTS
        tokens, shares = [0] * EXPERTS, x.new_zeros(EXPERTS)
        for place in range(s):
            logits = net.router.weight @ x[place, sequence]
            z = z + logits.exp().sum().log() ** 2
            shares = shares + logits.softmax(0)
            best = sorted(range(EXPERTS), key=lambda e: (-float(logits[e].detach()), e))[:K]
            weights = torch.stack([logits[e] for e in best]).softmax(0)
            for weight, e in zip(weights, best, strict=True):
                tokens[e] += 1
                taken[e] += 1
                if room is not None and taken[e] > room:
                    continue
                token = x[place, sequence]
                inside = net.up.weight[e] @ token
                inside = F.silu(inside) if net.gate is None else F.silu(net.gate.weight[e] @ token) * inside
                y[place, sequence] = y[place, sequence] + weight * (net.down.weight[e] @ inside)
        balance = balance + sum(n * share for n, share in zip(tokens, shares, strict=True)) * EXPERTS / (
            K * s * s
        )
    return y, balance, z


def total(y: Tensor, routed: Routed, weights: Tensor) -> Tensor:
    return (y * weights).sum() + 0.3 * routed.balance_loss + 0.01 * routed.z_loss


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("capacity", "room"), [(None, None), (0.75, 3), (1e-9, 1), (1e300, LENGTH)]
)  # 0.75 * 8 * 2 / 4
def test_a_mixture_is_a_loop_over_tokens(gated: bool, capacity: float | None, room: int | None) -> None:
    net, x = mixture(gated=gated, capacity=capacity), values(LENGTH, BATCH, HIDDEN, seed=5).requires_grad_()
    y, routed = net(x)
    expected, balance, z = by_hand(net, x, room)
    assert_near(y, expected)
    assert_near(routed.balance_loss, balance)
    assert_near(routed.z_loss, z)
    assert int(routed.counts.sum()) == LENGTH * BATCH * K
    assert (int(routed.dropped) > 0) == (room is not None and room < LENGTH)
    parameters = [x, *net.parameters()]
    weights = values(LENGTH, BATCH, HIDDEN, seed=6)
    found = torch.autograd.grad(total(y, routed, weights), parameters)
    right = torch.autograd.grad((expected * weights).sum() + 0.3 * balance + 0.01 * z, parameters)
    for mine, theirs in zip(found, right, strict=True):
        assert_near(mine, theirs)


def assert_equals_one(mesh: Mesh, *, sequence_parallel: bool = False, **options: Any) -> None:
    """Each data rank has sequences of its own, as many on each; one process has all of them."""
    ranks, rank = mesh.data.size, mesh.data.rank
    whole, net = mixture(**options), mixture(mesh, sequence_parallel=sequence_parallel, **options)
    for name, parameter in net.named_parameters():
        assert_near(
            parameter.detach(), dict(whole.named_parameters())[name].detach()[full_index(parameter)], name
        )
    dim = 0 if sequence_parallel and mesh.tp.size > 1 else None
    x = values(LENGTH, ranks * BATCH, HIDDEN, seed=5)
    weights = values(LENGTH, ranks * BATCH, HIDDEN, seed=6)
    own = slice(rank * BATCH, (rank + 1) * BATCH)

    everything = x.clone().requires_grad_()
    y, routed = whole(everything)
    total(y, routed, weights).backward()

    mine = part(x[:, own], mesh.tp, dim).clone().requires_grad_()
    found, here = net(mine)
    # Under sequence parallelism each rank has the whole balance loss, and its own tokens' gradient of it.
    total(found, here, part(weights[:, own], mesh.tp, dim)).backward()
    assert everything.grad is not None
    assert_near(found, part(y[:, own], mesh.tp, dim))
    assert_near(mine.grad, part(everything.grad[:, own], mesh.tp, dim))
    assert_near(all_reduce(here.balance_loss.detach().clone(), mesh.data), routed.balance_loss.detach())
    for name, parameter in net.named_parameters():
        record = sharding_of(parameter)
        gradient = parameter.grad
        assert gradient is not None
        gradient = all_reduce(gradient.clone(), record.reduced or mesh.data)
        for axis in record.partial:
            gradient = all_reduce(gradient, axis)
        right = dict(whole.named_parameters())[name].grad
        assert right is not None
        assert_near(gradient, right[full_index(parameter)], name)


OPTIONS: list[dict[str, Any]] = [{}, {"gated": False}, {"capacity": 0.75}]


@pytest.mark.ranks(4)
def test_experts_on_four_ranks() -> None:
    for dp, ep, tp in ((2, 2, 2), (4, 4, 1), (4, 2, 1), (1, 1, 4)):
        mesh = Mesh(dp=dp, ep=ep, tp=tp)
        for options in OPTIONS:
            assert_equals_one(mesh, **options)
            if mesh.tp.size > 1:
                assert_equals_one(mesh, sequence_parallel=True, **options)
        mesh.close()


@pytest.mark.ranks(3)
def test_three_ranks_that_nothing_divides_by() -> None:
    """Seven features over three ranks; with ``ep`` experts have to."""
    mesh = Mesh(tp=3)
    assert_equals_one(mesh)
    mesh.close()
    mesh = Mesh(dp=3, ep=3)
    with pytest.raises(ValueError, match="4 experts cannot be spread evenly over the 3 ranks of axis 'ep'"):
        mixture(mesh)


def test_of_equal_experts_the_first_are_chosen_and_choices_do_not_depend_on_the_format() -> None:
    router = TopKRouter(HIDDEN, EXPERTS, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        router.weight.zero_()
    routing = router(torch.ones(2, 3, HIDDEN, dtype=torch.bfloat16))
    assert routing.experts.tolist() == [[[0, 1]] * 3] * 2
    assert routing.logits.dtype == torch.float32
    assert routing.weights.tolist() == [[[0.5, 0.5]] * 3] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router.float()(torch.ones(2, 3, HIDDEN)).logits.dtype == torch.float32


@pytest.mark.ranks(2)
def test_the_bias_moves_towards_experts_that_have_less_to_do_alike_on_all_ranks() -> None:
    mesh = Mesh(dp=2)
    router = TopKRouter(HIDDEN, EXPERTS, 1, bias=True, dtype=F64)
    counts = torch.tensor([5, 1, 0, 2] if mesh.data.is_first else [1, 1, 0, 2])
    router.move_bias(counts, 0.1, mesh.data)
    assert router.bias is not None
    assert router.bias.tolist() == pytest.approx([-0.1, 0.1, 0.1, -0.1])
    with torch.no_grad():
        router.weight.zero_()
    routing = router(torch.ones(1, 1, HIDDEN, dtype=F64))
    assert routing.experts.item() == 1  # the first of those that were moved up
    assert routing.probabilities.tolist() == [[[0.25] * 4]]  # what is chosen, not what it is multiplied by
    assert "bias" in router.state_dict()


def test_a_function_of_gate_and_up_takes_the_place_of_their_product() -> None:
    x = values(LENGTH, BATCH, HIDDEN, seed=5)
    one, other = mixture(activation=F.gelu), mixture(gating=lambda gate, up: F.gelu(gate) * up)
    assert torch.equal(one(x)[0], other(x)[0])


def test_losses_of_a_batch_are_the_sums_of_its_sequences() -> None:
    net, x = mixture(), values(LENGTH, BATCH, HIDDEN, seed=5)
    whole = net.router(x)
    parts = [net.router(x[:, b : b + 1]) for b in range(BATCH)]
    for loss in (balance_loss, router_z_loss):
        one: Callable[[Any], Tensor] = loss
        assert_near(one(whole), sum((one(each) for each in parts), torch.zeros((), dtype=F64)))
    with torch.no_grad():
        net.router.weight.zero_()
    assert float(balance_loss(net.router(x)).detach()) / BATCH >= 1.0  # all tokens on two experts of four


@pytest.mark.ranks(2)
def test_room_in_a_sequence_that_is_cut_goes_by_its_order() -> None:
    axis = Mesh(tp=2).tp
    generator = torch.Generator().manual_seed(1)
    experts = torch.randint(EXPERTS, (LENGTH, BATCH, K), generator=generator)
    right = within_capacity(experts, 3, EXPERTS)
    assert 0 < int(right.sum()) < right.numel()
    own = part(experts, axis, 0)
    assert torch.equal(all_gather(within_capacity(own, 3, EXPERTS, axis).long(), axis), right.long())


@pytest.mark.ranks(6)
def test_room_goes_by_the_order_of_a_sequence_that_a_context_axis_cuts() -> None:
    """Also under sequence parallelism, with shares that lie in one piece of the zig-zag, or have a part of two."""
    for cp, tp, length in ((6, 1, 12), (3, 2, 18), (2, 3, 12), (3, 2, 6), (2, 3, 0)):
        mesh = Mesh(cp=cp, tp=tp)
        generator = torch.Generator().manual_seed(1)
        experts = torch.randint(EXPERTS, (length, BATCH, K), generator=generator)
        right = within_capacity(experts, 3, EXPERTS)
        assert int(right.sum()) < right.numel() or length == 0
        own = part(cut_context(experts, mesh.cp, 0), mesh.tp, 0)
        found = within_capacity(own, 3, EXPERTS, mesh.tp, mesh.cp)
        assert torch.equal(found, part(cut_context(right, mesh.cp, 0), mesh.tp, 0)), (cp, tp, length)
        mesh.close()


def test_of_a_given_length_room_does_not_depend_on_what_comes_later() -> None:
    net, x = mixture(capacity=0.75, capacity_length=LENGTH), values(LENGTH, BATCH, HIDDEN, seed=5)
    y, routed = net(x)
    assert int(routed.dropped) > 0
    for length in range(LENGTH):
        assert_near(net(x[:length])[0], y[:length])


@pytest.mark.ranks(2)
def test_weight_gradients_may_be_put_off_and_frozen_experts_cost_none() -> None:
    mesh = Mesh(dp=2, ep=2)
    x = values(LENGTH, BATCH, HIDDEN, seed=5 + mesh.data.rank)
    gradients = []
    for deferred in (False, True):
        net = mixture(mesh)
        net.up.weight.requires_grad_(False)
        queue = WeightGradients()
        if deferred:
            for parameter in net.parameters():
                gradient_work(parameter).queue = queue
        y, routed = net(x)
        total(y, routed, torch.ones_like(y)).backward()
        if deferred:
            assert net.down.weight.grad is None
            assert len(queue) == 2
            queue.run()
        assert net.up.weight.grad is None
        gradients.append([p.grad for p in net.parameters() if p.requires_grad])
    for now, later in zip(*gradients, strict=True):
        assert_near(later, now)


@pytest.mark.ranks(2)
def test_nobody_may_choose_an_expert_and_a_rank_may_have_no_tokens() -> None:
    mesh = Mesh(dp=2, ep=2)
    net = mixture(mesh)
    with torch.no_grad():
        net.router.weight.copy_(torch.arange(EXPERTS)[:, None].expand(-1, HIDDEN))
    x = torch.ones(LENGTH * mesh.data.rank, BATCH, HIDDEN, dtype=F64)
    y, routed = net(x)
    assert y.shape == x.shape
    (y.sum() + routed.balance_loss).backward()
    assert net.down.weight.grad is not None
    used = net.down.weight.grad.abs().sum((1, 2)) > 0
    assert used.tolist() == ([False, False] if mesh.ep.is_first else [True, True])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="k=5 of 4 experts"):
        TopKRouter(HIDDEN, EXPERTS, 5)
    for capacity in (0, float("inf")):
        with pytest.raises(ValueError, match=f"capacity={capacity}"):
            mixture(capacity=capacity)
    with pytest.raises(ValueError, match="built without bias=True"):
        TopKRouter(HIDDEN, EXPERTS, 1).move_bias(torch.zeros(EXPERTS), 0.1)


@pytest.mark.ranks(2)
def test_axes_and_inputs_that_cannot_be_are_refused() -> None:
    mesh = Mesh(dp=2)
    with pytest.raises(ValueError, match=r"share more than this rank; give ep=mesh\.ep"):
        MixtureOfExperts(HIDDEN, FFN, EXPERTS, K, ep=mesh.dp, reduced=mesh.expert_data)
    for shape in ((4, HIDDEN), (4, 2, HIDDEN + 1)):
        with pytest.raises(ValueError, match=r"takes \[sequence, batch, 6\]"):
            mixture()(torch.zeros(shape, dtype=F64))


def test_a_single_choice_teaches_the_router() -> None:
    router = TopKRouter(HIDDEN, EXPERTS, 1, dtype=F64)
    x = values(LENGTH, BATCH, HIDDEN, seed=5)
    routing = router(x)
    assert_near(routing.weights[..., 0], routing.probabilities.amax(-1))
    (gradient,) = torch.autograd.grad(routing.weights.sum(), router.weight)
    assert float(gradient.abs().max()) > 1e-3


def test_the_bias_of_a_16_bit_router_moves_in_small_steps() -> None:
    router = TopKRouter(HIDDEN, 2, 1, bias=True).bfloat16()
    for _ in range(300):
        router.move_bias(torch.tensor([1, 0]), 0.001)
    assert router.weight.dtype == torch.bfloat16
    assert router.bias is not None
    assert router.bias.tolist() == pytest.approx([-0.3, 0.3], rel=1e-4)


@pytest.mark.ranks(2)
def test_records_survive_what_torch_does_to_parameters() -> None:
    """The router's gradient is partial where ranks see different tokens, in a copy as well."""
    net = mixture(Mesh(tp=2), sequence_parallel=True)
    partial = sharding_of(net.router.weight).partial
    assert [axis.name for axis in partial] == ["tp"]
    loaded = mixture(Mesh(tp=2), sequence_parallel=True)
    loaded.load_state_dict(net.state_dict(), assign=True)
    for other in (copy.deepcopy(net), loaded, net.to("meta")):
        for name, parameter in other.named_parameters():
            record = sharding_of(parameter)
            assert (record.partial == partial) == name.startswith("router"), name
            assert bool(record.splits) != name.startswith("router"), name
