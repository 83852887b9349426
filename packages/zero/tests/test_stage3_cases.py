"""B062 to B067: parameters that are not there between their uses, and everything that finds them all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.comm.tests.live import LiveBytes
from packages.zero.tests.nets import STAGES, assert_equal, batch, make_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.comm import Axis, Mesh, name_parameters
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import save_checkpoint

GATHERING = tuple(stage for stage in STAGES if stage > 2)
"""The stages at which parameters come and go."""

WAYS: tuple[dict[str, Any], ...] = ({}, {"prefetch": 0}, {"prefetch": 2, "keep_gathered": 60})
"""How stage 3 may be told to gather."""


# -- B062, B063: read anywhere, counted anywhere ------------------------------------------------------


class Sibling(nn.Module):
    """Uses the weight of a module that it does not own."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7))
        self._owner = [owner]  # not a child

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._owner[0].weight.T) * self.scale[:5]


class Nested(nn.Module):
    """Calls itself, ``depth`` times, around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        inner = torch.tanh(self.layer(x))
        out: Tensor = self(inner, depth - 1) + self.layer(inner) if depth else inner
        return out


class Entangled(nn.Module):
    """[4, 5] to [4, 5]; parameters are read by others than their owners, and owners run more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.nested = Nested()
        self.b = Sibling(self.a)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.nested(self.nested(self.a(x), 2), 1)
        out: Tensor = self.b(x) + self.frozen(x[:, :5])
        return out


def entangled() -> Entangled:
    torch.manual_seed(2)
    return Entangled().double()


def penalised_loss(net: Entangled, x: Tensor) -> Tensor:
    """With terms that read parameters while no module runs."""
    decay = torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()
    loss: Tensor = net(x).square().mean() + 0.1 * net.a.bias.sum() ** 2 + 0.01 * decay
    return loss


def train(
    net: Entangled, axis: Axis, *, stage: int, steps: int = 3, **options: Any
) -> list[tuple[float, ...]]:
    """Losses, norms and, outside of everything, sums of all parameters, step by step."""
    optimizer = make_optimizer(
        net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, clip=1.0, bucket_mb=3e-4, **options
    )
    seen = []
    for step in range(steps):
        loss = penalised_loss(net, batch(step, axis.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), float(optimizer.grad_norm), *(p.sum().item() for p in net.parameters())))
    return seen


@pytest.mark.ranks(2)
def test_b062_parameters_read_outside_their_module() -> None:
    """By a sibling, in a penalty, by nested and repeated calls, and summed up between steps: all as at stage 0."""
    axis = Mesh(dp=2).data
    right = entangled()
    expected = train(right, axis, stage=0)
    for stage in GATHERING:
        for way in WAYS:
            net = entangled()
            found = train(net, axis, stage=stage, **way)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-14), way
            assert_equal(net, list(right.parameters()))


def what_is_told(net: nn.Module) -> dict[str, Any]:
    """What logs and FLOP counts ask of a module."""
    return {
        "count": sum(parameter.numel() for parameter in net.parameters()),
        "trainable": sum(parameter.nelement() for parameter in net.parameters() if parameter.requires_grad),
        "shapes": {name: (tuple(p.shape), p.size(), p.dim(), p.dtype) for name, p in net.named_parameters()},
        "bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
        "lengths": [len(parameter) for parameter in net.parameters()],
        "state": {name: tuple(value.shape) for name, value in net.state_dict().items()},
        "flops": 2
        * sum(m.weight.shape[0] * m.weight.shape[1] for m in net.modules() if isinstance(m, nn.Linear)),
    }


@pytest.mark.ranks(2)
def test_b063_counts_and_shapes_are_the_full_ones() -> None:
    """On both ranks, before and after a step; telling them gathers nothing."""
    axis = Mesh(dp=2).data
    right = what_is_told(entangled())
    assert right["count"] == right["trainable"] + 30
    for stage in GATHERING:
        net = entangled()
        optimizer = make_optimizer(net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01)
        for step in range(2):
            assert what_is_told(net) == right
            net.zero_grad()
            penalised_loss(net, batch(step, axis.rank)).backward()
            optimizer.step()
            assert optimizer.live_parameters == 0
        assert what_is_told(net) == right


# -- B064, B065: values and memory from the beginning -------------------------------------------------


def initialise(module: nn.Module) -> None:
    """A user's own: N(0, 0.02) for all weights, and one bias is 7."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.constant_(module.bias, 7.0 if module.out_features == 3 else 0.0)


def layers(device: str = "cpu") -> nn.Sequential:
    """Without values of their own where the device is ``meta``."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)), nn.Linear(9, 3)).double()


def on_meta(axis: Axis, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    """Built without memory, initialised unit by unit."""
    net = layers("meta")
    torch.manual_seed(6)
    return net, make_optimizer(net, torch.optim.AdamW, data=axis, initialize=initialise, **options)


def afterwards(axis: Axis, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    """Sharded first, then initialised as always."""
    net = layers()
    optimizer = make_optimizer(net, torch.optim.AdamW, data=axis, **options)
    torch.manual_seed(6)
    net.apply(initialise)
    return net, optimizer


def in_context(axis: Axis, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    """Sharded first, and initialised where all parameters are whole."""
    net = layers()
    optimizer = make_optimizer(net, torch.optim.AdamW, data=axis, **options)
    torch.manual_seed(6)
    with optimizer.full_parameters(net):
        net.apply(initialise)
    return net, optimizer


Construction = Callable[..., tuple[nn.Module, ZeroOptimizer]]


@pytest.mark.ranks(2)
def test_b064_initialisation_of_ones_own() -> None:
    """The values of a whole model with the same seed, in the parameters and in what is trained."""
    axis = Mesh(dp=2).data
    right = layers()
    torch.manual_seed(6)
    right.apply(initialise)
    start = [parameter.detach().clone() for parameter in right.parameters()]
    plain = torch.optim.AdamW(right.parameters(), lr=0.01)
    inputs = [torch.randn(4, 9, generator=torch.Generator().manual_seed(rank)).double() for rank in range(2)]
    for x in inputs:
        (right(x).square().mean() / 2).backward()
    plain.step()
    constructions: tuple[Construction, ...] = (on_meta, afterwards, in_context)
    for stage in GATHERING:
        for construct in constructions:
            net, optimizer = construct(axis, stage=stage, lr=0.01, bucket_mb=7e-4)
            assert len(optimizer.units) > 2
            with optimizer.full_parameters():
                for parameter, value in zip(net.parameters(), start, strict=True):
                    assert torch.equal(parameter, value), construct.__name__
                *_, last = net.parameters()
                assert last.tolist() == [7.0] * 3
            net(inputs[axis.rank]).square().mean().backward()
            optimizer.step()
            assert_equal(net, list(right.parameters()))


def test_b065_a_world_that_was_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks were started and none has called ``init``: neither builds a whole model in silence."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2.*shardweave\.comm\.init\(\)"):
        Mesh(dp=2)
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2.*shardweave\.comm\.init\(\)"):
        Mesh()


@pytest.mark.ranks(4)
def test_b065_construction_never_holds_the_whole_model() -> None:
    """16 MiB of weights on four ranks: a quarter stays, and a unit more was the most there was."""
    axis = Mesh(dp=4).data
    num_layers, width = 16, 512
    total = 4 * num_layers * width * width
    assert total == 16 << 20
    bound = total // 4 + 3 * total // num_layers  # a unit, and what it takes to fill and to send one
    for stage in GATHERING:
        with torch.device("meta"):
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        with LiveBytes(bound) as memory:
            optimizer = make_optimizer(net, torch.optim.SGD, stage=stage, data=axis, lr=0.1, bucket_mb=1)
            held = memory.now()
        assert len(optimizer.units) == num_layers
        assert total // 4 <= held <= total // 4 + 4096
        assert memory.peak < bound


# -- B066: released again -----------------------------------------------------------------------------

LAYER = 12 * 12 + 12
"""Elements of a layer, which is a unit."""


class Eight(nn.Module):
    """Eight equal layers; tells ``look`` when each has begun, and fails in the fourth when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(8))
        self.look: Callable[[], None] = lambda: None
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.look()
            if self.fails and number == 3:
                raise ArithmeticError("in the fourth layer")
        return x


@contextmanager
def watched(net: Eight, optimizer: ZeroOptimizer) -> Iterator[list[int]]:
    """Elements gathered, inside each layer and after it, forward and backward."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(optimizer.live_parameters)

    def look_in_backward(module: nn.Module, arguments: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(look)

    handles = [layer.register_forward_pre_hook(look) for layer in net.layers]
    handles += [layer.register_forward_hook(look_in_backward) for layer in net.layers]
    net.look = look
    yield seen
    net.look = lambda: None
    for handle in handles:
        handle.remove()


@pytest.mark.ranks(2)
def test_b066_gathered_parameters_are_released(tmp_path: Path) -> None:
    """At most a layer and those gathered ahead at a time; none after a backward pass, an error, an evaluation, a save.

    After a forward pass there is what the backward pass begins with.
    """
    mesh = Mesh(dp=2)
    x = torch.randn(3, 12)
    for stage in GATHERING:
        for prefetch in (0, 1, 2):
            net = Eight()
            name_parameters(net)
            optimizer = make_optimizer(
                net,
                torch.optim.AdamW,
                stage=stage,
                data=mesh.data,
                lr=0.01,
                bucket_mb=1e-4,
                prefetch=prefetch,
            )
            assert len(optimizer.units) == 8
            assert optimizer.live_parameters == 0
            most = (1 + prefetch) * LAYER
            for step in range(3):
                with watched(net, optimizer) as seen:
                    loss = net(x).square().mean()
                    # With these the backward pass begins, as is known by then.
                    begins = max(1, prefetch) * LAYER if step else 0
                    assert optimizer.live_parameters == begins, "after the forward pass"
                    loss.backward()
                    assert optimizer.live_parameters == 0, "after the backward pass"
                assert len(seen) == 8 + 8 + 8
                assert LAYER <= max(seen) <= most
                optimizer.step()
                optimizer.zero_grad()
                assert optimizer.live_parameters == 0, "after the step"
            net.fails = True
            with pytest.raises(ArithmeticError):
                net(x)
            assert optimizer.live_parameters == 0, "after an exception"
            net.fails = False
            with torch.no_grad(), watched(net.eval(), optimizer) as seen:
                net(x)
            assert max(seen) <= most, str(seen)
            assert optimizer.live_parameters == 0, "after an evaluation"
            save_checkpoint(tmp_path / f"{stage}-{prefetch}", optimizer, world=mesh.world)
            assert optimizer.live_parameters == 0, "after saving"
            with optimizer.full_parameters():
                assert optimizer.live_parameters == 8 * LAYER
                whole = {name: value.clone() for name, value in net.state_dict().items()}
            assert optimizer.live_parameters == 0, "after consolidating"
            assert all(bool(value.abs().sum() > 0) for value in whole.values())


# -- B067: generation ---------------------------------------------------------------------------------

WORDS, END = 9, 0


class Speaker(nn.Module):
    """[tokens] to [tokens, words]; the logits of a token depend on it alone, so that texts can be told beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        logits: Tensor = self.head(x + torch.tanh(self.inner(x)))
        return logits


def speaker() -> Speaker:
    """Speaks 8 -> 7 -> ... -> 1 -> end, from wherever it is started."""
    torch.manual_seed(1)
    net = Speaker()
    with torch.no_grad():
        net.embedding.weight.copy_(torch.eye(WORDS, 16))
        net.inner.weight.zero_()
        net.inner.bias.zero_()
        net.head.weight.copy_(5 * torch.eye(WORDS, 16).roll(-1, 0))
    return net


def generate(net: nn.Module, start: int, at_most: int = 20) -> list[int]:
    """Greedily, token by token, until the end of the text."""
    text = [start]
    with torch.no_grad():
        while text[-1] != END and len(text) <= at_most:
            text.append(int(net(torch.tensor(text))[-1].argmax()))
    return text[1:]


@pytest.mark.ranks(4, timeout=60)
def test_b067_texts_of_different_lengths() -> None:
    """One rank is done after two tokens, the other after five; on two ranks, and on two of four."""
    starts = (2, 5)
    for mesh in (Mesh(dp=4), Mesh(dp=2, tp=2)):
        axis = mesh.data
        start = starts[axis.rank % 2]
        right = generate(speaker(), start)
        assert len(right) == start
        for stage in GATHERING:
            net = speaker()
            optimizer = make_optimizer(
                net, torch.optim.SGD, stage=stage, data=axis, model=mesh.model, lr=0.1, bucket_mb=3e-4
            )
            for _ in range(2):
                F.cross_entropy(net(torch.tensor([1, 2, 3])), torch.tensor([0, 1, 2])).backward()
                optimizer.zero_grad()
                with optimizer.full_parameters():
                    assert generate(net, start) == right
                assert optimizer.live_parameters == 0
            assert generate(net, 4) == generate(
                speaker(), 4
            )  # as many tokens everywhere: nothing has to be said
            F.cross_entropy(net(torch.tensor([1, 2, 3])), torch.tensor([0, 1, 2])).backward()
            optimizer.step()
