"""What a stranger gives us by mistake is told in words: the setting, its value, the rule and the way out.

In one run of two ranks, and before anything is sent, except where ranks have to tell each other to see it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from packages.tensor_parallel.tests.reference import assert_near, part, values, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardweave.comm import Axis, Mesh, all_reduce, full_index, sharding_of
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    Cut,
    FusedColumnLinear,
    MixtureOfExperts,
    ParallelAttention,
    Plan,
    RowParallelLinear,
    StackedLinear,
    TopKRouter,
    VocabParallelEmbedding,
    assert_replicas_equal,
    column_linear,
    cut_context,
    gather,
    gather_context,
    mark_partial,
    parallelize,
    split_heads,
    vocab_parallel_cross_entropy,
    vocab_parallel_head_loss,
)

PLAN = {"0": "column", "2": "row"}
IDS = torch.zeros(3, dtype=torch.int64)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)).double()


def split_mlp(axis: Axis) -> nn.Module:
    return parallelize(mlp(), PLAN, axis, check=False)


def takers(tp: Axis) -> dict[str, Callable[[Any], object]]:
    """Everything that takes an axis, and what the axis is called there."""
    x = values(4, 8)
    return {
        "axis of column": lambda axis: ColumnParallelLinear(8, 8, axis),
        "axis of row": lambda axis: RowParallelLinear(8, 8, axis),
        "axis of vocab": lambda axis: VocabParallelEmbedding(8, 8, axis),
        "axis of fused": lambda axis: FusedColumnLinear(8, {"query": 8}, axis),
        "axis of attention": lambda axis: ParallelAttention(8, 2, axis),
        "axis of parallelize": lambda axis: parallelize(mlp(), PLAN, axis),
        "axis of gather": lambda axis: gather(mlp(), axis),
        "axis of mark_partial": lambda axis: mark_partial(mlp(), axis),
        "axis of replicas": lambda axis: assert_replicas_equal(mlp(), axis),
        "axis of loss": lambda axis: vocab_parallel_cross_entropy(values(3, 4), IDS, axis, vocab_size=8),
        "axis of head": lambda axis: vocab_parallel_head_loss(
            values(3, 8), values(4, 8), IDS, axis, vocab_size=8
        ),
        "axis of cut": lambda axis: cut_context(x, axis, 0),
        "axis of gather_context": lambda axis: gather_context(x, axis, 0),
        "axis of product": lambda axis: column_linear(x, (values(4, 8),), (None,), axis),
        "axis of heads": lambda axis: split_heads(4, 2, axis),
        "ep of experts": lambda axis: MixtureOfExperts(8, 8, 4, 2, ep=axis, reduced=tp),
        "tp of experts": lambda axis: MixtureOfExperts(8, 8, 4, 2, tp=axis),
        "ep of stacked": lambda axis: StackedLinear(4, 8, 8, split="row", ep=axis, tp=tp),
        "context of attention": lambda axis: ParallelAttention(8, 2, tp, context=axis),
    }


def mistakes(mesh: Mesh) -> Iterator[tuple[Callable[[], object], str]]:
    """What is done, and what has to be said."""
    tp, x = mesh.tp, values(4, 8)

    def plan(given: Any) -> Callable[[], object]:
        return lambda: parallelize(mlp(), given, tp)

    yield plan(["0"]), r"styles of a plan are a list, \['0'\]: give a mapping"
    yield plan(3), "styles of a plan are a int, 3"
    yield plan({"0": 1}), "styles of a plan have '0': 1: patterns are text and what they stand for is text"
    yield plan({0: "column"}), "styles of a plan have 0: 'column'"
    yield plan({}), "the plan names no layer, so nothing would be split"
    yield plan("llama"), "plan 'llama' does not exist"
    cut: Any = {"": Cut(0, 2)}
    yield (
        lambda: Plan({}, arguments=cut),
        r"arguments of a plan have '': Cut\(.*what they stand for is a mapping",
    )
    cut = {"": {"bias": (0, 4)}}
    yield lambda: Plan({}, arguments=cut), r"argument 'bias' of '' is to be cut by \(0, 4\): give a Cut"
    yield lambda: Cut(-1, 4), "dim=-1, size=4.: a dimension counted from the front"
    parts: Any = [8, 8]
    yield (
        lambda: FusedColumnLinear(8, parts, tp),
        r"parts=\[8, 8\]: a fused layer needs at least one part, by name",
    )
    tensor: Any = values(3)
    yield lambda: mark_partial(tensor, tp), "a Tensor is to be marked: give a module, a parameter"
    yield lambda: assert_replicas_equal(tensor, tp), "a Tensor is to be compared: give the module"
    yield lambda: cut_context(x, tp, 2), r"dim 2 is no dimension of x of shape \(4, 8\)"
    router = TopKRouter(8, 4, 2, bias=True)
    yield (
        lambda: router.move_bias(torch.zeros(5), 0.1),
        r"counts of shape \(5,\) for 4 experts; give Routed.counts",
    )
    k: Any = 2.0
    yield lambda: TopKRouter(8, 4, k), "k=2.0 of 4 experts"
    yield lambda: parallelize(split_mlp(tp), PLAN, tp), "'0' is split already .* call gather"
    yield (
        lambda: parallelize(cast(Any, mlp().state_dict()), PLAN, tp),
        "module is a OrderedDict: give the torch.nn",
    )
    row = RowParallelLinear(8, 8, tp, dtype=torch.float64)
    yield (
        lambda: row(x),
        r"all 8 features, of which a row-parallel layer takes this rank's 4.*scatter_to\(x, axis, 1\)",
    )
    for wrong in ("0", True, -1, 1.0):
        dim: Any = wrong
        message = (
            rf"sequence_dim={wrong!r}: give the number of the sequence's dimension, counted from the front"
        )
        for layer in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelAttention):
            yield partial(layer, 8, 8, tp, sequence_dim=dim), message
        yield partial(parallelize, mlp(), PLAN, tp, sequence_dim=dim), message
    attention = ParallelAttention(8, 2, tp, dtype=torch.float64)
    yield lambda: attention(x), r"input of shape \(4, 8\): attention takes \[s, b, 8\].*x.unsqueeze\(1\)"
    yield lambda: attention(x.view(2, 2, 1, 8)), r"attention takes \[s, b, 8\]"
    yield (
        lambda: ParallelAttention(8, 2, tp, context=tp),
        "shares the heads and context=.* give two axes of one mesh",
    )
    name: Any = "gelu"
    yield lambda: MixtureOfExperts(8, 8, 4, 2, activation=name), "activation='gelu': give the function itself"
    yield lambda: MixtureOfExperts(8, 8, 4, 2, capacity=name), "capacity='gelu': a multiple of an even share"
    yield (
        lambda: MixtureOfExperts(8, 8, 4, 2, ep=tp, reduced=tp, tp=tp),
        "ep=.* spreads the experts and tp=.* splits",
    )
    yield (
        lambda: MixtureOfExperts(8, 8, 4, 2, context=tp, tp=tp),
        "context=.* holds parts of the sequences and tp=.* mesh.cp and mesh.tp",
    )
    axes: Any = {"ep": Axis.single(), "tp": tp}
    yield (
        lambda: StackedLinear(4, 8, 8, split="columns", **axes),
        "split='columns': 'column' splits output features",
    )
    features: Any = 8 / 2
    yield lambda: ColumnParallelLinear(8, features, tp), "out_features=4.0: give the whole number of features"
    yield lambda: RowParallelLinear(-4, 8, tp), "in_features=-4: give the whole number of features"
    for narrow in (ColumnParallelLinear(8, 8, tp), RowParallelLinear(16, 8, tp)):
        yield (
            partial(narrow, x),
            r"input of torch.float64 for weights of torch.float32: .* torch.autocast",
        )
    yield (
        lambda: row(torch.zeros(2, 4, dtype=torch.int64)),
        "input of torch.int64: layers multiply floating-point",
    )
    table = VocabParallelEmbedding(8, 8, tp)
    yield lambda: table(torch.zeros(2)), "token ids of torch.float32: they are whole numbers"
    yield (
        lambda: vocab_parallel_cross_entropy(values(3, 4), values(3), tp, vocab_size=8),
        "targets of torch.float64: they are whole numbers",
    )


@pytest.mark.ranks(2)
def test_mistakes_are_told_before_anything_is_sent() -> None:
    mesh = Mesh(tp=2)
    group, of_torch = dist.group.WORLD, DeviceMesh("cpu", [0, 1])
    for wrong, found in (
        (group, r"\(ProcessGroup\)"),
        (of_torch, r"\(DeviceMesh\)"),
        (2, r"2 \(int\)"),
        (mesh, "a Mesh"),
    ):
        for name, take in takers(mesh.tp).items():
            with pytest.raises(
                TypeError, match=rf"^{name.split()[0]} is .*{found}, not an axis: give an axis of"
            ):
                take(wrong)
    mesh.ledger.reset()
    for do, message in mistakes(mesh):
        with pytest.raises((ValueError, TypeError), match=message):
            do()
    assert mesh.ledger.total().calls == 0


@pytest.mark.ranks(2)
def test_what_only_another_rank_shows_is_told_at_the_first_call() -> None:
    """Unequal parts would end the process in gloo; different tokens would train on a mixture."""
    mesh = Mesh(dp=2)  # its data axis is none of the axes of the layers below
    tp = Mesh(tp=2).tp
    uneven = values(4 + tp.rank, 8)
    layers: list[nn.Module] = [
        ColumnParallelLinear(8, 8, tp, sequence_dim=0, dtype=torch.float64),
        FusedColumnLinear(8, {"query": 4}, tp, sequence_dim=0, dtype=torch.float64),
        parallelize(nn.Linear(8, 6).double(), {"": "column:3"}, tp, sequence_dim=0, check=False),
    ]
    for layer in layers:
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"axis 'tp' hold parts of \[4, 5\] tokens along sequence_dim 0.*pad"
            ):
                layer(uneven)
        layer(uneven[:4])
    attention = ParallelAttention(8, 2, tp, sequence_dim=0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"hold parts of \[4, 5\] tokens"):
        attention(uneven.unsqueeze(1))
    table = VocabParallelEmbedding(8, 4, tp)
    for ids in (
        torch.tensor([[1, 2], [3, tp.rank]]),
        torch.arange(4).roll(tp.rank),
        torch.arange(4 + tp.rank),
    ):
        with pytest.raises(ValueError, match=r"given different token ids .* sample by mesh.data.rank"):
            table(ids)
    table(torch.arange(4))
    split = DistributedDataParallel(split_mlp(tp))  # over both ranks
    with pytest.raises(
        ValueError, match=r"over ranks \[0, 1\] has made equal, .* process_group=mesh.data.group"
    ):
        split(values(4, 8))
    spread = Mesh(dp=2, ep=2)
    experts = MixtureOfExperts(8, 8, 4, 2, ep=spread.ep, reduced=spread.expert_data)
    with pytest.raises(
        ValueError, match=r"has made equal, .* of axis 'ep'.* leave it unwrapped: shardweave.zero's"
    ):
        DistributedDataParallel(experts, process_group=spread.data.group)(values(3, 2, 8).float())
    wrapped = DistributedDataParallel(mlp(), process_group=mesh.data.group)
    wrapped(values(4, 8, seed=tp.rank)).sum().backward()
    grad = wrapped.module[0].weight.grad
    assert_near(all_reduce(grad.clone(), mesh.data) / 2, grad)


@pytest.mark.ranks(2)
def test_data_parallel_around_tensor_parallel() -> None:
    """torch's wrapper over the data axis, whose ranks hold the same slices."""
    for mesh in (Mesh(dp=2), Mesh(tp=2)):
        wrapped = DistributedDataParallel(
            split_mlp(mesh.tp), process_group=mesh.data.group or dist.new_group([dist.get_rank()])
        )
        batch = values(4, 8).chunk(mesh.data.size)[mesh.data.rank]
        wrapped(batch).square().mean().backward()
        whole = mlp()
        whole(values(4, 8)).square().mean().backward()
        for found, expected in zip(wrapped.module.parameters(), whole.parameters(), strict=True):
            assert expected.grad is not None
            assert_near(found.grad, expected.grad[full_index(found)])


@pytest.mark.ranks(2)
def test_what_torch_does_to_modules() -> None:
    """No gradients, inference, compiling, copying, saving: right, or refused by name."""
    # Where a trace is interrupted, torch itself looks at .grad of everything.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    tp, x = Mesh(tp=2).tp, values(4, 8)
    expected = mlp()(x).detach()
    for context in (torch.no_grad, torch.inference_mode, nullcontext):
        with context():
            split = split_mlp(tp)
            assert_near(split(x).detach().clone(), expected)
    split, whole = split_mlp(tp), mlp()
    compiled = torch.compile(nn.Sequential(split, nn.Tanh()), backend="aot_eager")
    compiled(x).sum().backward()
    whole(x).tanh().sum().backward()
    for found, other in zip(split.parameters(), whole.parameters(), strict=True):
        assert other.grad is not None
        assert_near(found.grad, other.grad[full_index(found)])
    own = x.clone().requires_grad_()
    frozen = split_mlp(tp).requires_grad_(False)
    assert not frozen(x).requires_grad
    frozen(own).sum().backward()
    reference = x.clone().requires_grad_()
    mlp()(reference).sum().backward()
    assert_near(own.grad, reference.grad)
    with pytest.raises(
        TypeError, match=r"Axis\('tp'.* cannot be pickled.* save module.state_dict\(\), or .*gather"
    ):
        pickle.dumps(split_mlp(tp))
    stream = io.BytesIO()
    torch.save(split_mlp(tp).state_dict(), stream)
    stream.seek(0)
    split.load_state_dict(torch.load(stream))
    assert_near(split(x).detach(), expected)
    assert sharding_of(split.get_parameter("0.weight")).splits


@pytest.mark.ranks(2)
def test_results_may_be_changed_in_place() -> None:
    """As those of torch's layers: an activation in place, a residual added to them."""
    tp, x = Mesh(tp=2).tp, values(4, 2, 8)
    for dim, pieces in ((None, False), (0, False), (0, True)):
        results = []
        for axis in (tp, Axis.single()):
            torch.manual_seed(0)
            up = ColumnParallelLinear(8, 6, axis, sequence_dim=dim, decomposed=pieces, dtype=torch.float64)
            down = RowParallelLinear(6, 8, axis, sequence_dim=dim, decomposed=pieces, dtype=torch.float64)
            table = VocabParallelEmbedding(5, 8, axis, sequence_dim=dim, dtype=torch.float64)
            ids = torch.arange(8).view(4, 2) % 5
            y = table(ids)
            y += part(x, axis, dim)
            y = down(torch.relu_(up(y)))
            y.add_(1)
            y.square().sum().backward()
            results.append((whole(y.detach(), axis, dim), up.weight, table.weight))
        (found, *weights), (expected, *others) = results
        assert_near(found, expected)
        for one, other in zip(weights, others, strict=True):
            assert other.grad is not None
            assert_near(one.grad, other.grad[full_index(one)])


@pytest.mark.ranks(2)
def test_transformer_layers_of_torch_take_no_short_cut_in_evaluation() -> None:
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    tp, x = Mesh(tp=2).tp, values(2, 3, 8)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
    original = nn.TransformerEncoder(layer, 2).double().eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        expected = original(x), original(x, src_key_padding_mask=padding)
    split = deepcopy(original)
    parallelize(split, {"layers.*.linear1": "column", "layers.*.linear2": "row"}, tp)
    with torch.no_grad():
        assert_near(split(x), expected[0])
        # what is padded is 0 in torch's nested tensors and something else without them
        assert_near(split(x, src_key_padding_mask=padding)[~padding], expected[1][~padding])
    gather(split, tp)
    with torch.no_grad():
        assert torch.equal(split(x, src_key_padding_mask=padding), expected[1])


@pytest.mark.ranks(2)
def test_whole_values_for_split_layers() -> None:
    tp = Mesh(tp=2).tp
    whole, split = mlp(), split_mlp(tp)
    for assign in (False, True):
        with pytest.raises(
            RuntimeError, match=r"0.weight is split over axis 'tp', .* of shape \(6, 8\): load whole weights"
        ):
            split.load_state_dict(whole.state_dict(), assign=assign)
    fused = nn.Sequential(nn.Linear(8, 6))
    values_of_all = {name: value.clone() for name, value in fused.state_dict().items()}
    parallelize(fused, {"0": "column:3"}, tp, check=False)
    with pytest.raises(
        RuntimeError, match=r"0.weight is the whole of a matrix that is split in blocks here: load whole"
    ):
        fused.load_state_dict(values_of_all)
    # the way out that the message names
    own = {name: value[full_index(split.get_parameter(name))] for name, value in whole.state_dict().items()}
    split.load_state_dict(own)
    assert_near(split(values(4, 8)).detach(), whole(values(4, 8)).detach())


@pytest.mark.ranks(2)
def test_what_would_write_slices_as_a_model_says_so() -> None:
    """transformers' ``save_pretrained``, of the module and of one in it; back after ``gather``."""

    class Saving(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inside(x)
            return y

        def save_pretrained(self, directory: str) -> str:
            return directory

    tp = Mesh(tp=2).tp
    module = Saving(Saving(mlp()))
    parallelize(module, {"inside.inside.0": "column", "inside.inside.2": "row"}, tp)
    for one in (module, module.inside):
        with pytest.raises(
            RuntimeError, match=r"would save this rank's slices .*gather\(model, axis\) first"
        ):
            cast(Saving, one).save_pretrained("here")
    gather(module, tp)
    assert module.save_pretrained("here") == "here"
    assert "save_pretrained" not in module.__dict__


@pytest.mark.ranks(2)
def test_hooks_of_transformers_are_named() -> None:
    def make_inputs_require_grads(module: nn.Module, given: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    tp, module = Mesh(tp=2).tp, mlp()
    handle = module[0].register_forward_hook(make_inputs_require_grads)
    with pytest.raises(
        ValueError, match=r"module '0' has hooks.* call model.disable_input_require_grads\(\)"
    ):
        parallelize(module, PLAN, tp)
    handle.remove()
    parallelize(module, PLAN, tp)
