"""Parameters as views of flat buffers: nothing about them changes but where they lie."""

from __future__ import annotations

import pytest
import torch
from packages.zero.tests.nets import batch, loss_of, model
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.zero import MixedPrecision, ZeroOptimizer
from shardweave.zero.flat import memory_runs


def zero(parameters: list[nn.Parameter], **options: object) -> ZeroOptimizer:
    return ZeroOptimizer(parameters, torch.optim.SGD, data=Axis.single(), lr=0.1, **options)  # type: ignore[arg-type]


def test_values_shapes_and_objects_stay() -> None:
    net = model()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in net.named_parameters()}
    optimizer = zero(list(net.parameters()))
    for name, parameter in net.named_parameters():
        same, value = before[name]
        assert parameter is same
        assert parameter.is_contiguous()
        assert torch.equal(parameter, value)
    assert (
        len({p.untyped_storage().data_ptr() for p in net.parameters() if p.numel()})
        == len(optimizer.units)
        == 1
    )


def test_non_contiguous_parameters() -> None:
    weight = nn.Parameter(torch.randn(6, 4).t())
    value = weight.detach().clone()
    zero([weight])
    assert torch.equal(weight, value)


def test_tied_layers_stay_tied() -> None:
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    both = nn.ModuleList([embedding, head])
    optimizer = zero(list(both.parameters()))
    head(embedding(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    assert head.weight is embedding.weight
    assert optimizer.units[0].numel == 21


def test_neighbours_in_memory_stay_neighbours() -> None:
    """What a fused product of query, key and value needs, in whatever order they are registered."""
    memory = torch.randn(12, 4)
    query, key, value = (nn.Parameter(part) for part in memory.split([6, 4, 2]))
    others = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    names = [f"p{i}" for i in range(6)]
    order = [key, others[0], query, others[1], value, others[2]]
    assert memory_runs(order, names) == [(2, 1), None, (2, 0), None, (2, 2), None]
    zero(order, bucket_mb=1e-5)
    starts = [p.storage_offset() for p in (query, key, value)]
    assert starts == [0, 24, 40]
    assert len({p.untyped_storage().data_ptr() for p in (query, key, value)}) == 1
    assert torch.equal(torch.cat([query, key, value]), memory)


def test_two_parameters_over_the_same_memory_are_refused() -> None:
    memory = torch.zeros(6)
    with pytest.raises(ValueError, match=r"group0\.0 and group0\.1 share memory"):
        zero([nn.Parameter(memory[:4]), nn.Parameter(memory[2:])])


def test_a_moved_module_is_noticed() -> None:
    net = model()
    optimizer = zero(list(net.parameters()))
    loss_of(net, batch(0, 0)).backward()
    net.to(torch.float32)
    with pytest.raises(ValueError, match="was moved to other memory"):
        optimizer.step()


def test_loading_a_state_dict_into_the_module_is_fine() -> None:
    net, other = model(), model(seed=3)
    optimizer = zero(list(net.parameters()))
    net.load_state_dict(other.state_dict())
    loss_of(net, batch(0, 0)).backward()
    optimizer.step()
    loss_of(other, batch(0, 0)).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


def test_two_dtypes_are_two_units() -> None:
    wide, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = zero([wide, narrow])
    assert [unit.key.dtype for unit in optimizer.units] == [torch.float32, torch.bfloat16]
    assert [f.parameters for f in optimizer.formats] == [torch.float32, torch.bfloat16]
    (wide.sum() + narrow.sum()).backward()
    optimizer.step()
    assert wide.tolist() == pytest.approx([0.9] * 3)
    assert narrow.tolist() == [0.8984375] * 3


def test_converting_parameters_keeps_hooks_and_autograd() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    optimizer = zero([weight], precision=MixedPrecision(parameters=torch.bfloat16))
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert len(seen) == 1
    optimizer.step()
    assert weight.tolist() == [0.80078125] * 3


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(7, 3, sparse=True)
    optimizer = zero(list(embedding.parameters()))
    loss = embedding(torch.tensor([1])).sum()
    with pytest.raises(ValueError, match="sparse=False"):
        loss.backward()
    optimizer.zero_grad()
