"""Which parameters share a buffer: pictures of small layouts, and what has to hold for all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardweave.comm import Axis, Mesh, Topology
from shardweave.zero import Member, UnitKey, UnitPlan, ZeroOptimizer, plan_units
from shardweave.zero.units import unit_mb

KEY = UnitKey(torch.float32, torch.device("cpu"))
TP = Axis("tp", (0,), 0)


def member(index: int, numel: int, key: UnitKey = KEY, **more: object) -> Member:
    return replace(Member(index, (numel,), key), **more)  # type: ignore[arg-type]


def draw(plans: tuple[UnitPlan, ...]) -> list[str]:
    """One letter an element, a point for padding, a bar between shards."""
    pictures = []
    for plan in plans:
        line = "".join(chr(ord("a") + slot.index) * (slot.stop - slot.start) for slot in plan.slots)
        line += "." * plan.padding
        ranges = [plan.shard_range(position) for position in range(plan.shards)]
        pictures.append("|".join(line[start:stop] for start, stop in ranges))
    return pictures


def test_registration_order_without_gaps_cut_at_the_bucket() -> None:
    members = [member(i, n) for i, n in enumerate((3, 2, 4, 1, 9, 2))]
    assert draw(plan_units(members, shards=2, bucket_bytes=6 * 4)) == [
        "aaa|bb.",
        "ccc|cd.",
        "eeeee|eeee.",
        "f|f",
    ]


def test_fewer_elements_than_shards() -> None:
    assert draw(plan_units([member(0, 1), member(1, 0)], shards=4, bucket_bytes=100)) == ["a|.|.|."]


def test_runs_stay_together_in_their_order() -> None:
    """Weights lie side by side, so do biases, though they are registered alternately."""
    runs = [(0, 0), (1, 0), (0, 1), (1, 1), None]
    members = [member(i, n, run=run) for i, (n, run) in enumerate(zip((4, 1, 4, 1, 2), runs, strict=True))]
    assert draw(plan_units(members, shards=1, bucket_bytes=9 * 4)) == ["aaaacccc", "bdee"]
    assert draw(plan_units(members, shards=1, bucket_bytes=4)) == ["aaaacccc", "bd", "ee"]


def test_partial_and_tied_parameters_have_units_of_their_own() -> None:
    partial = replace(KEY, partial=(TP,))
    members = [member(0, 2), member(1, 1, partial), member(2, 2), member(3, 1, partial)]
    assert draw(plan_units(members, shards=2, bucket_bytes=100)) == ["aa|cc", "b|d"]
    narrow = replace(KEY, dtype=torch.bfloat16)
    assert draw(plan_units([member(0, 1), member(1, 1, narrow)], shards=1, bucket_bytes=100)) == ["a", "b"]


def test_tied_units_go_by_name() -> None:
    tied = replace(KEY, partial=(TP,), tied=TP)
    one = [member(0, 2, tied, name="x"), member(1, 3, tied, name="y")]
    two = [member(0, 1), member(1, 3, tied, name="y"), member(2, 2, tied, name="x")]
    assert draw(plan_units(one, shards=2, bucket_bytes=100)) == ["aab|bb."]
    assert draw(plan_units(two, shards=2, bucket_bytes=100)) == ["a|.", "ccb|bb."]


def test_a_unit_shorter_than_its_first_parameter_comes_in_forward_order() -> None:
    plans = plan_units([member(0, 5), member(1, 1), member(2, 1)], shards=1, bucket_bytes=4)
    assert [plan.first_index for plan in plans] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_parameter_once_and_padding_below_the_number_of_shards(seed: int) -> None:
    random.seed(seed)
    keys = [KEY, replace(KEY, partial=(TP,)), replace(KEY, dtype=torch.bfloat16)]
    members = [member(i, random.choice((0, 1, 2, 3, 17, 100)), random.choice(keys)) for i in range(40)]
    shards = random.randint(1, 9)
    plans = plan_units(members, shards=shards, bucket_bytes=random.choice((1, 64, 400, 10_000)))
    slots = [slot for plan in plans for slot in plan.slots]
    assert sorted(slot.index for slot in slots) == list(range(40))
    for plan in plans:
        assert plan.length % shards == 0
        assert 0 <= plan.padding < shards
        assert {members[slot.index].key for slot in plan.slots} == {plan.key}
        assert [slot.start for slot in plan.slots][1:] == [slot.stop for slot in plan.slots][:-1]
        assert sum(end - start for start, end in (plan.shard_range(p) for p in range(shards))) == plan.length


def test_what_does_not_fill_a_unit_comes_first_in_forward_order() -> None:
    """It is launched last, and hidden by nothing."""
    members = [member(i, 2) for i in range(5)]
    assert draw(plan_units(members, shards=1, bucket_bytes=4 * 4)) == ["aa", "bbcc", "ddee"]


def test_units_are_25_mib_inside_a_node_unless_told_otherwise() -> None:
    assert unit_mb(None, far=False) == 25
    assert unit_mb(None, far=True) is None
    assert unit_mb(3, far=False) == unit_mb(3, far=True) == 3


@pytest.mark.ranks(2)
def test_units_by_the_links_of_the_data_axis() -> None:
    for topology, units in ((Topology.told(2, 2), 1), (Topology.told(2, 1), 2)):
        mesh = Mesh(dp=2, topology=topology)
        weights = nn.ParameterList(nn.Parameter(torch.zeros(2**20)) for _ in range(4))
        optimizer = ZeroOptimizer(weights.parameters(), torch.optim.SGD, data=mesh.data)
        assert len(optimizer.units) == units
        mesh.close()


@pytest.mark.parametrize("mib, units", [(1, 1), (16, 2), (320, 16), (1024, 41)])
def test_units_are_a_sixteenth_between_12_and_25_mib(mib: int, units: int) -> None:
    quarters = [member(i, 2**16) for i in range(4 * mib)]
    others = [member(4 * mib, 2**22, replace(KEY, partial=(TP,)))]
    plans = plan_units(quarters + others, shards=2, bucket_bytes=None)
    assert len(plans) == units + 1
    assert plans == plan_units(quarters + others, shards=2, bucket_bytes=None)
    alone = plan_units(others, shards=2, bucket_bytes=None)
    assert plans[-1] == alone[0], "copies of a unit are cut alike whatever is beside them"
