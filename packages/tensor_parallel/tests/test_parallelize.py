"""``parallelize`` on a module that knows nothing of us."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import (
    F64,
    assert_near,
    assert_parameters_equal,
    assert_same_training,
    on_ranks,
    part,
    values,
    whole,
)
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, sharding_of
from shardweave.tensor_parallel import assert_replicas_equal, parallelize

PLAN = {
    "embed": "vocab",
    "blocks.*.query": "column",
    "blocks.*.key": "column",
    "blocks.*.value": "column",
    "blocks.*.output": "row",
    "blocks.*.fc1": "column",
    "blocks.*.fc2": "row",
    "head": "column_gather",
}


class Block(nn.Module):
    """A user's transformer block, ``[b, s, h]``. It takes the number of heads from the tensors it gets."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, 12 * head_dim) for _ in range(3))
        self.output = nn.Linear(12 * head_dim, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 10), nn.Linear(10, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.output(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        z: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return z


class Model(nn.Module):
    def __init__(self, vocab: int = 11, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList([Block(hidden, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model(tied: bool = False) -> Model:
    torch.manual_seed(3)
    made = Model().double()
    if tied:
        made.head.weight = made.embed.weight
    return made


def step(module: nn.Module) -> Tensor:
    ids = torch.arange(24).view(2, 12) % 11
    logits: Tensor = module(ids)
    F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    return logits.detach()


@on_ranks
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_module_trains_as_before(ranks: int, sequence: bool, tied: bool) -> None:
    axis = Mesh(tp=ranks).tp
    reference, split = model(tied), model(tied)
    plan = PLAN | ({"**.norm*": "sequence"} if sequence else {})
    same = parallelize(split, plan, axis, sequence_dim=1 if sequence else None)
    assert same is split
    assert_same_training(split, reference, axis, lambda: step(split), lambda: step(reference))
    assert_replicas_equal(split, axis)
    if tied:
        assert split.head.weight is split.embed.weight


@on_ranks
def test_a_matrix_of_fused_blocks(ranks: int) -> None:
    """``[q; k; v]`` in one linear layer, cut by the user's code into three."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(6, 3 * 24)
            self.output = nn.Linear(24, 6)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p.unflatten(-1, (-1, 2)).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=-1))
            mixed = F.scaled_dot_product_attention(q, k, v)
            y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
            return y

    axis = Mesh(tp=ranks).tp
    torch.manual_seed(3)
    reference = Fused().double()
    split = deepcopy(reference)
    parallelize(split, {"qkv": "column:3", "output": "row"}, axis)
    x, weights = values(2, 5, 6), values(2, 5, 6, seed=2)
    for module in (split, reference):
        (module(x) * weights).sum().backward()
    assert_near(split(x), reference(x))
    blocks = reference.qkv.weight.detach().chunk(3)
    assert reference.qkv.weight.grad is not None
    for index, grads in enumerate(reference.qkv.weight.grad.chunk(3)):
        weight = split.get_parameter(f"qkv.{index}.weight")
        assert sharding_of(weight).shape == (24, 6)
        assert torch.equal(weight.detach(), blocks[index][comm.full_index(weight)])
        assert_near(weight.grad, grads[comm.full_index(weight)])
    assert_near(
        comm.gradient_norm(split.parameters(), axis),
        torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]),
    )
    if ranks > 1:
        with pytest.raises(ValueError, match="takes 6 features"):
            split.qkv(torch.ones(2, 5))


class Conv1D(nn.Module):
    """As in transformers: a linear layer with its weight the other way round."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(values(nx, nf, seed=7)), nn.Parameter(values(nf, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mixed(nn.Module):
    """A column-parallel layer of each kind, each before a row-parallel one: ``[b, s, 6]`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.fused_back = nn.Linear(6, 2 * 5), nn.Linear(5, 6)
        self.up, self.down = Conv1D(10, 6), Conv1D(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fused(x).chunk(2, dim=-1)
        x = x + self.fused_back(torch.sigmoid(gate) * up)
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


@pytest.mark.ranks(2)
def test_gathered_inputs_are_kept_by_layers_of_each_kind() -> None:
    mesh, x, weights = Mesh(tp=2), values(2, 6, 6), values(2, 6, 6, seed=2)
    torch.manual_seed(3)
    reference = Mixed().double()
    right = x.clone().requires_grad_()
    (reference(right) * weights).sum().backward()
    plan = {"fused": "column:2", "fused_back": "row", "up": "column", "down": "row"}
    gathers = []
    for keep_inputs in (False, True):
        split = parallelize(deepcopy(reference), plan, mesh.tp, sequence_dim=1, keep_inputs=keep_inputs)
        own = part(x, mesh.tp, 1).clone().requires_grad_()
        split(own)  # the first call compares lengths, too
        mesh.ledger.reset()
        y = split(own)
        (y * part(weights, mesh.tp, 1)).sum().backward()
        gathers.append(mesh.ledger.total(kind="all_gather").calls)
        assert_near(y, part(reference(x), mesh.tp, 1))
        assert right.grad is not None
        assert_near(own.grad, part(right.grad, mesh.tp, 1))
        comm.sum_partial_gradients(split.parameters())
        for name in ("up.weight", "down.weight", "up.bias", "down.bias", "fused_back.weight"):
            parameter, grad = split.get_parameter(name), reference.get_parameter(name).grad
            assert grad is not None
            assert_near(parameter.grad, grad[comm.full_index(parameter)], name)
        assert reference.fused.weight.grad is not None
        for index, grads in enumerate(reference.fused.weight.grad.chunk(2)):
            parameter = split.get_parameter(f"fused.{index}.weight")
            assert_near(parameter.grad, grads[comm.full_index(parameter)])
    assert gathers == [6, 4]


@pytest.mark.ranks(2)
def test_parameters_stay_the_same_objects() -> None:
    axis = Mesh(tp=2).tp
    split = model().eval()
    split.get_parameter("blocks.0.fc1.weight").requires_grad_(False)
    step(split)  # an optimizer and a backward pass before the split are no harm
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    optimizer.zero_grad()
    before = dict(split.named_parameters())
    comm.name_parameters(split, "net.")
    parallelize(split, PLAN, axis)
    after = dict(split.named_parameters())
    assert {name: id(p) for name, p in after.items()} == {name: id(p) for name, p in before.items()}
    assert sharding_of(after["blocks.1.fc1.weight"]).name == "net.blocks.1.fc1.weight"
    assert not after["blocks.0.fc1.weight"].requires_grad
    assert not split.get_submodule("blocks.0.fc1").training
    step(split)
    assert after["blocks.0.fc1.weight"].grad is None
    fc1 = after["blocks.1.fc1.weight"]
    assert fc1.grad is not None
    expected = fc1.detach() - 0.1 * fc1.grad
    optimizer.step()
    assert_near(fc1.detach(), expected)


@pytest.mark.ranks(2)
def test_a_module_used_twice_and_the_module_itself() -> None:
    axis = Mesh(tp=2).tp
    shared = nn.Linear(4, 4, dtype=F64)
    reference = nn.Sequential(shared, nn.Tanh(), shared)
    split = deepcopy(reference)
    parallelize(split, {"0": "column_gather", "2": "column_gather"}, axis)
    assert split[0] is split[2]
    assert_near(split(values(3, 4)), reference(values(3, 4)))
    alone = parallelize(deepcopy(shared), {"": "column_gather"}, axis)
    assert_near(alone(values(3, 4)), shared(values(3, 4)))


@pytest.mark.ranks(2)
def test_ranks_with_different_weights_are_refused_on_all_of_them() -> None:
    axis = Mesh(tp=2).tp
    split = model()
    if axis.is_last:
        with torch.no_grad():
            split.get_parameter("blocks.1.fc2.weight")[0, 0] += 1e-9
    before = deepcopy(split)
    with pytest.raises(ValueError, match=r"different values of blocks.1.fc2.weight;"):
        parallelize(split, PLAN, axis)
    assert type(split.embed) is nn.Embedding
    assert_parameters_equal(split, before)
    parallelize(split, PLAN, axis, check=False)
    assert_parameters_equal(split, before)


@pytest.mark.ranks(2)
def test_what_would_be_lost_is_refused() -> None:
    axis = Mesh(tp=2).tp
    split = model()
    step(split)
    with pytest.raises(ValueError, match=r"embed.weight has a gradient of the whole weight"):
        parallelize(split, PLAN, axis)
    split.zero_grad()
    handle = split.head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="module 'head' has hooks"):
        parallelize(split, PLAN, axis)
    handle.remove()
    for name in ("keep_inputs", "decomposed"):
        with pytest.raises(ValueError, match=f"{name} is about what is gathered .*; pass sequence_dim"):
            parallelize(split, PLAN, axis, **{name: True})
    with pytest.raises(ValueError, match="marks what sees a part of the sequence; pass sequence_dim"):
        parallelize(split, {"norm": "sequence"}, axis)
    with pytest.raises(
        ValueError, match=r"module 'blocks.0' .* 'blocks.0.query' in it is to be split \(column\)"
    ):
        parallelize(split, PLAN | {"blocks.0": "sequence"}, axis, sequence_dim=1)
    parallelize(split, PLAN, axis)
    with pytest.raises(ValueError, match=r"'embed' is split already \(a VocabParallelEmbedding\)"):
        parallelize(split, PLAN, axis)
    assert_parameters_equal(split, model())


@pytest.mark.ranks(3)
def test_a_module_on_the_meta_device_is_split_without_values() -> None:
    axis = Mesh(tp=3).tp
    with torch.device("meta"):
        split = Model()
    parallelize(split, PLAN, axis)
    assert split.head.weight.shape == ((4, 4, 3)[axis.rank], 6)
    assert split.head.weight.is_meta


def test_one_rank_needs_no_group() -> None:
    reference, split = model(), model()
    parallelize(split, PLAN, Axis.single())
    assert_near(step(split), step(reference))


@pytest.mark.ranks(2)
def test_the_layers_between_see_a_part_of_the_sequence() -> None:
    axis = Mesh(tp=2).tp
    split = parallelize(model(), PLAN | {"**.norm*": "sequence"}, axis, sequence_dim=1)
    seen = []
    split.get_submodule("norm").register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    step(split)
    assert seen[0].shape == (2, 6, 6)
    assert whole(seen[0].detach(), axis, 1).shape == (2, 12, 6)
    assert sharding_of(split.get_parameter("norm.weight")).partial == (axis,)
    assert part(values(2, 12, 6), axis, 1).shape == (2, 6, 6)
