"""Checkpoints know no layout: what is saved under one is found, bit for bit, under any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import (
    Axis,
    Mesh,
    Sharding,
    Split,
    all_reduce,
    counts_here,
    full_index,
    set_sharding,
    sharding_of,
    split_range,
)
from shardweave.comm.testing import run_ranks
from shardweave.zero import MixedPrecision, ZeroOptimizer, decay_groups
from shardweave.zero.checkpoint import (
    CheckpointError,
    damaged_files,
    load_checkpoint,
    read_manifest,
    read_tensors,
    save_checkpoint,
)

SHAPES = {"a": (7, 5), "b.weight": (6, 4, 2), "b.bias": (6,), "scale": (), "empty": (0, 3), "tail": (11,)}
"""Odd sizes: nothing divides by 2, 3 and 4 at once, one tensor has no dims and one no elements."""
SPLIT = {"a": 1, "b.weight": 0, "b.bias": 0}
"""The dim that tensor parallelism cuts, unevenly; the others are copies on every tensor rank."""


class Net(nn.Module):
    """Parameters only; each rank has its tensor rank's part of each."""

    def __init__(self, tensor: Axis, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            full = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).reshape(shape) + number
            splits: tuple[Split, ...] = ()
            if name in SPLIT and tensor.size > 1:
                part = split_range(shape[SPLIT[name]], tensor.size, tensor.rank)
                full = full.narrow(SPLIT[name], part.start, len(part))
                splits = (Split(tensor, SPLIT[name], part.start),)
            parameter = nn.Parameter(full.clone())
            set_sharding(parameter, Sharding(name, shape, splits))
            self.register_parameter(name.replace(".", "_"), parameter)

    def gradients(self, step: int) -> None:
        """Gradients that differ for every element and step, and are the same function of the full tensor."""
        for parameter in self.parameters():
            record = sharding_of(parameter)
            full = torch.linspace(1, 2, torch.Size(record.shape).numel(), dtype=torch.float64)
            part = full.reshape(record.shape)[full_index(parameter)] * torch.sin(torch.tensor(step + 1.0))
            (parameter * part.to(parameter.dtype)).sum().backward()


def build(
    mesh: Mesh, stage: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Net, ZeroOptimizer]:
    net = Net(mesh.tp, torch.promote_types(dtype, torch.float32))
    optimizer = ZeroOptimizer(
        decay_groups(net.parameters(), 0.1),
        options.pop("kind", torch.optim.AdamW),
        data=mesh.data,
        model=mesh.model,
        stage=stage,
        module=net,
        lr=1e-2,
        bucket_mb=2e-4,
        precision=MixedPrecision(parameters=dtype),
        **options,
    )
    return net, optimizer


def train(net: Net, optimizer: ZeroOptimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        net.gradients(step)
        optimizer.step()


def gathered(optimizer: ZeroOptimizer, mesh: Mesh) -> dict[str, Tensor]:
    """Values and states in their full shape, on every rank: an independent way to put them together."""
    kinds = ("values", "exp_avg", "exp_avg_sq")
    keys = [(f"{kind}/{name}", shape) for kind in kinds for name, shape in SHAPES.items()]
    sizes = [torch.Size(shape).numel() for _, shape in keys]
    everything = torch.zeros(sum(sizes), dtype=torch.float64)  # one sum over the ranks for all of them
    parts = everything.split(sizes)
    full = {key: part.view(shape) for (key, shape), part in zip(keys, parts, strict=True)}
    for piece in optimizer.pieces():
        if not counts_here(piece.parameter, mesh.model) or (optimizer.stage == 0 and not mesh.data.is_first):
            continue
        for kind in kinds:
            flat = piece.values if kind == "values" else piece.state[kind]
            local = torch.zeros(piece.parameter.numel(), dtype=torch.float64)
            local[piece.begin : piece.begin + flat.numel()] = flat.double()
            full[f"{kind}/{piece.name}"][full_index(piece.parameter)] += local.view(piece.parameter.shape)
    all_reduce(everything, mesh.world)
    return {name: values.clone() for name, values in full.items()}  # a view is sent with all it is a view of


LAYOUTS = [(1, 1, 0), (3, 1, 2), (2, 1, 0), (2, 2, 3), (1, 4, 3), (3, 2, 1)]
"""(data, tensor, stage)"""


def saved(folder: str, data: int, tensor: int, stage: int) -> dict[str, Tensor]:
    mesh = Mesh(dp=data, tp=tensor)
    net, optimizer = build(mesh, stage)
    train(net, optimizer, range(3))
    save_checkpoint(
        f"{folder}/{data}-{tensor}-{stage}", optimizer, world=mesh.world, values={"step": 3, "text": "ä"}
    )
    full = gathered(optimizer, mesh)
    train(net, optimizer, range(3, 5))
    return {**full, **{f"later {name}": values for name, values in gathered(optimizer, mesh).items()}}


def loaded(folder: str, data: int, tensor: int, stage: int) -> list[dict[str, Tensor]]:
    """Of every checkpoint in the folder: what is there after loading it here, and two steps later."""
    mesh = Mesh(dp=data, tp=tensor)
    found = []
    for path in sorted(Path(folder).iterdir()):
        net, optimizer = build(mesh, stage)
        for parameter in net.parameters():
            parameter.data.fill_(-7)  # whatever is not loaded would be seen
        values = load_checkpoint(path, optimizer, world=mesh.world).values
        assert (values["step"], values["text"]) == (3, "ä")
        full = gathered(optimizer, mesh)
        for parameter in net.parameters():
            if parameter.numel():
                whole = full[f"values/{sharding_of(parameter).name}"]
                assert torch.equal(parameter.detach(), whole[full_index(parameter)])
        assert all(group["lr"] == 1e-2 / 3 for group in optimizer.param_groups)
        steps = {int(piece.state["step"]) for piece in optimizer.pieces()}
        assert steps <= {3}
        train(net, optimizer, range(3, 5))
        found.append(
            {**full, **{f"later {name}": values for name, values in gathered(optimizer, mesh).items()}}
        )
    return found


@pytest.mark.timeout(240)
def test_b091_every_layout_loads_every_other_bit_for_bit(tmp_path: Path) -> None:
    sources = {
        f"{data}-{tensor}-{stage}": run_ranks(saved, data * tensor, str(tmp_path), data, tensor, stage)[0]
        for data, tensor, stage in LAYOUTS
    }
    right = sources["1-1-0"]
    for data, tensor, stage in LAYOUTS:
        for of_rank in run_ranks(loaded, data * tensor, str(tmp_path), data, tensor, stage):
            for source, full in zip(sorted(sources), of_rank, strict=True):
                for name, values in full.items():
                    if name.startswith("later"):
                        torch.testing.assert_close(values, right[name], rtol=1e-12, atol=1e-15)
                    else:
                        assert torch.equal(values, sources[source][name]), (
                            source,
                            (data, tensor, stage),
                            name,
                        )


def test_one_process_reads_whole_tensors_of_any_layout(tmp_path: Path) -> None:
    right = run_ranks(saved, 4, str(tmp_path), 2, 2, 3)[0]
    path = tmp_path / "2-2-3"
    for name, values in read_tensors(path).items():
        assert torch.equal(values, right[f"values/{name}"])
    assert torch.equal(read_tensors(path, ["exp_avg/a"])["exp_avg/a"], right["exp_avg/a"])
    manifest = read_manifest(path)
    assert manifest.tensors["b.weight"].shape == (6, 4, 2)
    assert damaged_files(path) == []
    with pytest.raises(CheckpointError, match="no tensor nobody"):
        read_tensors(path, ["nobody"])
