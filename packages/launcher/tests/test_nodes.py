"""The start of a run over several nodes: what is found out, measured, kept and said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shardweave.comm import ASSUMED, Topology, gather_values
from shardweave.launcher.layout import layout_of
from shardweave.launcher.nodes import hierarchy_remark, nodes_text, open_mesh
from shardweave.launcher.reading import load_config
from shardweave.launcher.run_directory import RunDirectory


def test_ranks_by_node_in_a_line() -> None:
    assert nodes_text(Topology.told(4, 2)) == "2 nodes, ranks 0-1 | 2-3"
    scattered = Topology.of_hosts(["a", "b", "a", "a", "b"])
    assert nodes_text(scattered) == "2 nodes, ranks 0, 2-3 | 1, 4"
    assert nodes_text(Topology.told(40, 2)).endswith("| 30-31 | ...")
    assert nodes_text(Topology.told(2, 1), "now") == f"2 nodes, ranks 0 | 1; {ASSUMED}, now"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([0, 0, 0], "ranks that reduce gradients together share a node"),
        ([0, 1, 2], "a node has one of the data ranks"),
        ([0, 0, 1], "nodes have unequally many of the data ranks: 2, 1"),
        ([0, 0, 1, 1], "`zero.replicas` cuts the data ranks elsewhere than the nodes do"),
    ],
)
def test_why_two_levels_do_nothing(nodes: list[int], reason: str) -> None:
    told = hierarchy_remark("two-level", nodes, in_use=False)
    assert told is not None
    assert told.startswith(f"`comm.hierarchy: two-level` has no effect because {reason}")
    assert hierarchy_remark("two-level", nodes, in_use=True) is None
    assert hierarchy_remark("auto", nodes, in_use=False) is None


def _open(place: Path, *overrides: str) -> list[str]:
    """What is said at a start over all ranks."""
    said: list[str] = []
    config = load_config(None, list(overrides))
    mesh = open_mesh(config, layout_of(config, dist.get_world_size()), RunDirectory(place), said.append)
    by_rank = gather_values([said, list(mesh.topology.links.measured)], mesh.world)
    assert all(lines == [] for lines, _ in by_rank[1:])
    assert all(measured == by_rank[0][1] for _, measured in by_rank)
    mesh.close()
    return list(by_rank[0][0])


@pytest.mark.hosts(2)
@pytest.mark.ranks(4, timeout=120)
def test_links_are_measured_once_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    [line] = _open(tmp_path)
    assert line.startswith("2 nodes, ranks 0-1 | 2-3; ")
    assert line.count("(measured)") == 2
    assert line.endswith(", now")
    text = file.read_text()
    [line] = _open(tmp_path)
    assert line.endswith(f", from {file}")
    assert file.read_text() == text
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_text(text.replace("[0, 0, 1, 1]", "[0, 1, 1, 1]"))  # of other nodes: measured again
    [line] = _open(tmp_path)
    assert line.endswith(", now")
    assert Topology.load(file).nodes == (0, 0, 1, 1)
    for path in (tmp_path / "flat", tmp_path / "two"):
        assert _open(path, f"comm.hierarchy={'two-level' if path.name == 'two' else 'flat'}") == [
            "2 nodes, ranks 0-1 | 2-3"
        ]
        assert not path.exists()


@pytest.mark.hosts(2)
@pytest.mark.ranks(4, timeout=120)
def test_what_crosses_nodes_and_what_has_no_effect_is_said(tmp_path: Path) -> None:
    said = _open(tmp_path, "parallel.tensor=4", "comm.hierarchy=flat")
    assert said[1].startswith("warning: mesh axis tp=4 crosses nodes: nodes hold 2 ranks")
    said = _open(tmp_path, "parallel.tensor=2", "comm.hierarchy=two-level")
    assert said[1].startswith(
        "warning: `comm.hierarchy: two-level` has no effect because a node has one of the"
    )
    nowhere = tmp_path / "file"
    nowhere.touch()  # in the place of the run's directory
    said = _open(nowhere)
    assert said[0].startswith("warning: the links are measured again at every start: ")
    assert said[1].endswith(", now")


@pytest.mark.ranks(2)
def test_on_one_node_nothing_is_measured_or_said(tmp_path: Path) -> None:
    assert _open(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    [remark] = _open(tmp_path, "comm.hierarchy=two-level")
    assert "share a node" in remark
