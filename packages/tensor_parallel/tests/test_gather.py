"""``gather``: the module as it was, with the weights that it has now; and plans that say more than styles."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import (
    assert_gradients_equal,
    assert_near,
    on_ranks,
    part,
    values,
    whole,
)
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, Sharding, sharding_of, sum_partial_gradients
from shardweave.tensor_parallel import ColumnParallelLinear, Cut, Plan, gather, parallelize, plan_for

HEADS, HEAD = 12, 2


class Conv1D(nn.Module):
    """As in transformers: a linear layer with its weight the other way round."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.3 * values(nx, nf, seed=nf))
        self.bias = nn.Parameter(values(nf, seed=nx))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Knows its number of heads, takes a bias for all of them and has fewer key heads: ``[b, s, h]``."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.heads, self.groups = HEADS, HEADS // key_heads
        self.query = nn.Linear(6, HEADS * HEAD)
        self.key, self.value = (nn.Linear(6, key_heads * HEAD, bias=False) for _ in range(2))
        self.output = nn.Linear(HEADS * HEAD, 6)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, HEAD)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).repeat_interleave(self.groups, 2).transpose(1, 2)
            for layer in (self.key, self.value)
        )
        mask = None if bias is None else bias.view(len(x), self.heads, 1, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y


class Model(nn.Module):
    """Everything that is split in one way or another; the head is the embedding."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.attention = Attention(key_heads)
        self.norm = nn.LayerNorm(6)
        self.fc1, self.fc2 = Conv1D(10, 6), Conv1D(6, 10)
        self.qkv, self.back = Conv1D(3 * 8, 6), nn.Linear(8, 6)
        self.fused = nn.Linear(6, 2 * 5)
        self.fused_back = nn.Linear(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        bias = values(len(ids) * HEADS, 1, ids.shape[1], seed=4)
        x = x + self.attention(self.norm(x), bias=bias) + self.attention(self.norm(x), bias)
        x = x + self.fc2(torch.tanh(self.fc1(x)))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.back(q * k + v)
        gate, up = self.fused(x).chunk(2, dim=-1)
        logits: Tensor = self.head(x + self.fused_back(torch.sigmoid(gate) * up))
        return logits


def model(key_heads: int = HEADS) -> Model:
    torch.manual_seed(3)
    return Model(key_heads).double()


def plan(axis: Axis, key_heads: int = HEADS) -> Plan:
    groups = max(1, HEADS // axis.size // max(1, key_heads // axis.size))
    return Plan(
        {
            "embed": "vocab",
            "attention.query": f"column_heads:{HEAD}",
            "attention.[kv]*": f"column_heads:{HEAD}",
            "attention.output": f"row_heads:{HEAD}",
            "fc1": "column",
            "fc2": "row",
            "qkv": "column:3",
            "back": "row",
            "fused": "column:2",
            "fused_back": "row",
            "head": "column_gather",
        },
        attributes={"attention": {"heads": "divide", "groups": groups}},
        arguments={"attention": {"bias": Cut(0, HEADS)}},
    )


def step(module: nn.Module) -> Tensor:
    ids = torch.arange(24).view(2, 12) % 11
    logits: Tensor = module(ids)
    F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    return logits.detach()


def assert_same(found: nn.Module, original: nn.Module) -> None:
    """Classes, options, names, ties and bits."""
    assert repr(found) == repr(original)
    assert list(found.state_dict()) == list(original.state_dict())
    for (name, left), right in zip(found.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(left, right), name
        assert left.is_contiguous()
        assert sharding_of(left) == Sharding("", tuple(right.shape))
    assert not any(child._forward_pre_hooks for child in found.modules())


@on_ranks
def test_there_and_back(ranks: int) -> None:
    axis = Mesh(tp=ranks).tp
    for key_heads in {1: (12, 3), 2: (12, 2, 1), 3: (12, 3, 1), 4: (12, 4, 2, 1)}[ranks]:
        original, split = model(key_heads), model(key_heads)
        names = {
            name: id(p) for name, p in split.named_parameters() if not name.startswith(("qkv", "fused."))
        }
        for _ in range(2):
            parallelize(split, plan(axis, key_heads), axis)
            assert split.head.weight is split.embed.weight
            gather(split, axis)
            assert_same(split, original)
            assert split.head.weight is split.embed.weight
            assert (split.attention.heads, split.embed.padding_idx) == (HEADS, 3)
        assert names.items() <= {name: id(p) for name, p in split.named_parameters()}.items()
        parallelize(split, plan(axis, key_heads), axis)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (split, original)]
        for _ in range(2):
            assert_near(step(split), step(original))
            sum_partial_gradients(split.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        copy = deepcopy(split)
        for trained in (split, copy):
            gather(trained, axis)
            for (name, left), right in zip(trained.named_parameters(), original.parameters(), strict=True):
                assert_near(left.detach(), right.detach(), name)
            assert_near(step(trained), step(original))
            original.zero_grad()


@pytest.mark.ranks(3)
def test_back_from_sequence_parallelism_and_of_a_single_layer() -> None:
    axis = Mesh(tp=3).tp
    torch.manual_seed(3)
    original = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 7), nn.Linear(7, 4)).double()
    split = deepcopy(original)
    comm.name_parameters(split)
    parallelize(split, {"0": "sequence", "1": "column", "2": "row"}, axis, sequence_dim=0)
    assert sharding_of(split.get_parameter("2.bias")).partial == (axis,)
    x = values(6, 4)
    for module, given in ((split, part(x, axis, 0)), (original, x)):
        y = module(given)
        y.square().sum().backward()
        assert_near(whole(y.detach(), axis, 0) if module is split else y.detach(), original(x).detach())
    assert_gradients_equal(split, original, axis)
    split.zero_grad()
    gather(split, axis)
    for (name, left), right in zip(split.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(left, right)
        assert sharding_of(left) == Sharding(name, tuple(right.shape))
    original.zero_grad()
    alone = parallelize(original[1], {"": "column"}, axis)
    assert isinstance(alone, ColumnParallelLinear)
    assert gather(alone, axis) is original[1]


@pytest.mark.ranks(4)
def test_what_was_split_in_several_calls_and_over_several_axes() -> None:
    mesh = Mesh(tp=2, cp=2)
    original, split = model(), model()
    comm.name_parameters(split)
    whole_plan = plan(mesh.tp)
    attention = {
        key.removeprefix("attention."): style for key, style in whole_plan.styles.items() if "." in key
    }
    parallelize(
        split.attention,
        Plan(attention, attributes={"": {"heads": "divide"}}, arguments={"": {"bias": Cut(0, HEADS)}}),
        mesh.tp,
    )
    parallelize(split, {"embed": "vocab", "head": "column_gather", "qkv": "column:3", "back": "row"}, mesh.tp)
    parallelize(
        split, Plan({"fc1": "column", "fc2": "row"}, attributes={"attention": {"groups": 1}}), mesh.cp
    )
    assert sharding_of(split.get_parameter("qkv.1.weight")).name == "qkv.1.weight"
    assert_near(step(split), step(original))
    split.zero_grad()
    gather(split, mesh.cp)
    kinds = [type(split.fc1), type(split.head)]
    assert (split.attention.heads, kinds) == (6, [Conv1D, ColumnParallelLinear])
    gather(split, mesh.tp)
    for name, parameter in split.named_parameters():
        assert sharding_of(parameter).name == name
        comm.set_sharding(parameter, Sharding("", sharding_of(parameter).shape))
    assert_same(split, model())


@pytest.mark.ranks(2)
def test_results_of_earlier_passes_may_still_be_held() -> None:
    axis = Mesh(tp=2).tp
    original, split = model(), model()
    calls: list[str] = []
    split.fc1.weight.register_post_accumulate_grad_hook(lambda _: calls.append("fc1"))
    held = [split(torch.arange(4).view(1, 4))]
    parallelize(split, plan(axis), axis)
    held.append(step(original))
    assert_near(step(split), held[1])
    split.zero_grad()
    held.append(split(torch.arange(4).view(1, 4)))
    gather(split, axis)
    step(split)
    for (name, left), right in zip(split.named_parameters(), original.parameters(), strict=True):
        assert_near(left.grad, right.grad, name)
    assert calls == ["fc1", "fc1"]


@pytest.mark.ranks(2)
def test_what_would_be_lost_is_refused() -> None:
    mesh = Mesh(tp=2)
    axis = mesh.tp
    split = model()
    with pytest.raises(
        ValueError, match="nothing in this Model is split over axis 'tp': parallelize has split"
    ):
        gather(split, axis)
    parallelize(split, plan(axis), axis)
    with pytest.raises(ValueError, match="split over axis 'dp': it was split over tp"):
        gather(split, mesh.dp)
    handle = split.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="module 'fc1' has hooks"):
        gather(split, axis)
    handle.remove()
    step(split)
    with pytest.raises(ValueError, match=r"embed.weight has a gradient of this rank's slice"):
        gather(split, axis)
    assert isinstance(split.attention.query, ColumnParallelLinear)
    split.zero_grad()
    assert_same(gather(split, axis), model())


@pytest.mark.ranks(2)
def test_mistakes_in_a_plan_are_told_before_anything_is_changed() -> None:
    axis = Mesh(tp=2).tp
    split = model()
    styles = plan(axis).styles

    def attribute(name: str, value: int | str) -> Plan:
        return Plan(styles, attributes={"attention": {name: value}})

    for wrong, message in (
        (Plan({"attention.query": "column_heads:8"}), r"query' \(column_heads:8\): 3 heads cannot be shared"),
        (Plan({"attention.query": "column_heads:7"}), "query' has 24 output features, not heads of 7"),
        (Plan({"back": "row_heads:8"}), r"'back' \(row_heads:8\) sums over 1 heads, fewer than the 2 ranks"),
        (Plan(styles, attributes={"attn": {"heads": 6}}), "pattern 'attn' matches no module"),
        (attribute("num", 6), "attribute 'num' of module 'attention', which is None"),
        (attribute("heads", "half"), "to become 'half'; give a number or 'divide'"),
        (attribute("groups", "divide"), "is 1, which the 2 ranks of axis 'tp' do not"),
        (Plan(styles, arguments={"attention": {"alibi": Cut(0, 12)}}), "whose forward has x, bias;"),
        (Plan(styles, arguments={"attention": {"bias": Cut(0, 3)}}), "blocks of 3, which the 2 ranks"),
        (Plan(styles, random={"attention": "dense"}), "in module 'attention' at 'dense': there is none"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(split, wrong, axis)
        assert_same(split, model())
    for call, message in (
        (lambda: parallelize(split, "car", axis), "plan 'car' does not exist"),  # type: ignore[arg-type]
        (lambda: parallelize(split, "auto", axis), "one of gpt2, llama, .*, gpt_neo; Model has None"),
        (lambda: parallelize(split, "auto", axis, sequence_dim=1), "plan 'auto' with sequence_dim=1"),
        (lambda: plan_for(split, axis), "Write a plan of name patterns"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    parallelize(split, plan(axis), axis)
    with pytest.raises(ValueError, match=r"argument 'bias' of module 'attention' has shape \(5, 1\)"):
        split.attention(values(1, 2, 6), bias=values(5, 1))
