"""Links: what a message takes, and the two numbers found again from what two messages took."""

from __future__ import annotations

import math

import pytest

from shardweave.comm import ASSUMED, Link, Links


def test_a_message_takes_latency_and_bytes() -> None:
    link = Link(0.5, 100.0)
    assert link.seconds(0) == 0.5
    assert link.seconds(200) == 2.5
    assert link.seconds(200, messages=3) == 3.5


@pytest.mark.parametrize("latency, bandwidth", [(0.0, 1.0), (3e-6, 2e11), (0.25, 1.25e5)])
def test_a_link_is_found_again_through_two_messages(latency: float, bandwidth: float) -> None:
    link = Link(latency, bandwidth)
    points = [(float(n), link.seconds(n)) for n in (1000, 9_000_000)]
    found = Link.through(points[0], points[1])
    assert found.latency == pytest.approx(latency, abs=1e-12)
    assert found.bandwidth == pytest.approx(bandwidth)


def test_noise_gives_no_impossible_link() -> None:
    assert Link.through((10, 2.0), (1000, 2.0)) == Link(0.0, 500.0)
    steep = Link.through((100, 0.1), (200, 1.1))  # the line crosses zero seconds at 90 bytes
    assert steep.latency == 0.0
    assert steep.bandwidth == pytest.approx(100.0)


@pytest.mark.parametrize(
    "small, large", [((10, 1.0), (10, 2.0)), ((20, 1.0), (10, 2.0)), ((1, 0.0), (2, 0.0))]
)
def test_a_fit_needs_a_smaller_and_a_larger_message(
    small: tuple[float, float], large: tuple[float, float]
) -> None:
    with pytest.raises(ValueError, match="through a smaller and a larger message"):
        Link.through(small, large)


@pytest.mark.parametrize("latency", [-1e-9, math.nan, math.inf])
def test_an_impossible_latency_is_refused(latency: float) -> None:
    with pytest.raises(ValueError, match="latency"):
        Link(latency, 1.0)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_bandwidth_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Link(0.0, bandwidth)


def test_what_is_measured_is_told_from_what_is_assumed() -> None:
    assert ASSUMED.measured == ()
    fast = Link(1e-6, 1e11)
    links = ASSUMED.updated({"node": fast})
    assert (links.node, links.network, links.measured) == (fast, ASSUMED.network, ("node",))
    both = links.updated({"network": Link(2e-5, 125e6)})
    assert both.measured == ("node", "network")
    assert str(links) == "node 1 us, 100 GB/s (measured); network 100 us, 1.25 GB/s (assumed)"
    assert both.link("network") == Link(2e-5, 125e6)
    with pytest.raises(ValueError, match="link class 'rack' does not exist; choose one of node, network"):
        links.link("rack")
    with pytest.raises(ValueError, match="it holds some of"):
        Links(fast, fast, ("network", "node"))
