"""Sends and receives: both directions at once, big messages, many under way."""

from __future__ import annotations

import pytest
import torch

from shardweave import comm
from shardweave.comm import Mesh, Message, Pending


@pytest.mark.ranks(2)
def test_both_directions_of_a_step_are_posted_together() -> None:
    """64 MiB both ways: two blocking sends would stand still for ever."""
    axis = Mesh(pp=2).pp
    peer = 1 - axis.rank
    mine = torch.full((16 * 2**20,), float(axis.rank + 1))
    theirs = torch.empty_like(mine)
    sent, received = comm.exchange([Message.send(mine, axis, peer), Message.receive(theirs, axis, peer)])
    received.wait()
    sent.wait()
    assert theirs[0].item() == theirs[-1].item() == peer + 1


@pytest.mark.ranks(2)
def test_messages_of_one_tag_arrive_in_order_and_tags_keep_apart() -> None:
    axis = Mesh(pp=2).pp
    if axis.is_first:
        for value, tag in ((1.0, 5), (2.0, 5), (3.0, 6)):
            comm.start_send(torch.tensor([value]), axis, 1, tag).wait()
    else:
        buffers = [torch.zeros(1) for _ in range(3)]
        pending = [
            comm.start_receive(buffer, axis, 0, tag) for buffer, tag in zip(buffers, (6, 5, 5), strict=True)
        ]
        assert [p.wait().item() for p in pending] == [3.0, 1.0, 2.0]
    # Of these torch keeps the values as they were, and a mark.
    number = torch.tensor([1 + 2j])
    for marked in (number.conj(), number.conj().imag):
        if axis.is_first:
            comm.send(marked, axis, 1)
        else:
            assert comm.receive(torch.empty(1, dtype=marked.dtype), axis, 0).tolist() == marked.tolist()


@pytest.mark.ranks(2)
def test_complex_numbers_and_memory_in_pieces_travel() -> None:
    axis = Mesh(pp=2).pp
    value = (torch.arange(6).reshape(2, 3) * (1 + 2j)).t()
    if axis.is_first:
        assert comm.send(value, axis, 1) is value
    else:
        buffer = torch.zeros(2, 3, dtype=value.dtype).t()
        assert comm.receive(buffer, axis, 0) is buffer
        assert torch.equal(buffer, value)


@pytest.mark.ranks(2)
def test_sends_are_counted_by_the_sender() -> None:
    axis = Mesh(pp=2).pp
    if axis.is_first:
        comm.send(torch.ones(10), axis, 1)
    else:
        comm.receive(torch.empty(10), axis, 0)
    kind = "send" if axis.is_first else "receive"
    traffic = axis.ledger.total("pp", kind)
    assert (traffic.calls, traffic.elements, traffic.bytes) == (1, 10, 40)
    assert axis.ledger.total().sent == (40 if axis.is_first else 0)


def test_wrong_tags_and_peers_are_refused() -> None:
    axis = comm.Axis.single("pp")
    with pytest.raises(ValueError, match="position 0 is not another rank"):
        comm.send(torch.ones(1), axis, 0)
    assert comm.exchange([]) == []


def test_a_call_that_failed_at_its_end_has_no_result_afterwards() -> None:
    def fail() -> None:
        raise RuntimeError("the second round")

    pending = Pending([], fail)
    with pytest.raises(RuntimeError, match="the second round"):
        pending.wait()
    with pytest.raises(AttributeError, match="_result"):
        pending.wait()
