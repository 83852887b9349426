"""When a gradient is final: micro-batches, deferred weight gradients, several listeners."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import WeightGradients, gradient_work


def listening(parameter: nn.Parameter, every: bool = False) -> list[float]:
    seen: list[float] = []

    def listener(p: Tensor) -> None:
        assert p.grad is not None
        seen.append(p.grad.sum().item())

    gradient_work(parameter).subscribe(parameter, listener, every)
    return seen


def test_a_plain_backward_is_final() -> None:
    p = nn.Parameter(torch.ones(2))
    seen = listening(p)
    (3 * p).sum().backward()
    assert seen == [6.0]


def test_held_gradients_are_final_with_the_last_micro_batch_only() -> None:
    p = nn.Parameter(torch.ones(2))
    final, every = listening(p), listening(p, every=True)
    work = gradient_work(p)
    work.hold()
    p.sum().backward()
    p.sum().backward()
    work.release()
    p.sum().backward()
    assert final == [6.0]
    assert every == [2.0, 4.0, 6.0]


def test_a_deferred_weight_gradient_makes_it_final_when_it_runs() -> None:
    p = nn.Parameter(torch.ones(2))
    final, queue = listening(p), WeightGradients()
    gradient_work(p).queue = queue

    def compute() -> None:
        assert p.grad is not None
        p.grad += 10.0

    queue.put([p], compute)
    p.sum().backward()
    assert final == []
    assert len(queue) == 1
    queue.run()
    assert final == [22.0]
    assert len(queue) == 0


def test_a_queue_is_expected_where_there_is_one_or_one_was_promised() -> None:
    work = gradient_work(nn.Parameter(torch.ones(1)))
    assert not work.deferrable
    work.promise()
    work.promise()
    work.retract()
    assert work.deferrable
    assert work.final  # nothing is put off yet
    work.retract()
    assert not work.deferrable
    with pytest.raises(RuntimeError, match="retract\\(\\) without promise"):
        work.retract()
    work.queue = WeightGradients()
    assert work.deferrable


def test_pieces_run_in_order_and_in_part() -> None:
    p = nn.Parameter(torch.ones(1))
    order: list[int] = []
    p.grad = torch.zeros(1)
    final, queue = listening(p), WeightGradients()
    for number in range(3):
        queue.put([p], partial(order.append, number))
    queue.run(2)
    assert order == [0, 1]
    assert final == []
    queue.run()
    assert order == [0, 1, 2]
    assert final == [0.0]


def test_after_a_failure_nothing_is_owed_any_more() -> None:
    p, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    final, queue = listening(p), WeightGradients()

    def fail() -> None:
        raise ArithmeticError

    queue.put([p], fail)
    queue.put([p, other], fail)
    with pytest.raises(ArithmeticError):
        queue.run()
    assert len(queue) == 1
    assert gradient_work(other).deferred
    queue.drop()
    assert len(queue) == 0
    assert gradient_work(p).final
    assert gradient_work(other).final
    assert final == []
    p.sum().backward()
    assert final == [1.0]


def test_a_removed_listener_is_silent_and_counts_have_to_match() -> None:
    p = nn.Parameter(torch.ones(1))
    seen: list[Tensor] = []
    subscription = gradient_work(p).subscribe(p, seen.append)
    subscription.remove()
    subscription.remove()
    p.sum().backward()
    assert seen == []
    with pytest.raises(RuntimeError, match="without hold"):
        gradient_work(p).release()
    with pytest.raises(RuntimeError, match="without defer"):
        gradient_work(p).complete(p)
    with pytest.raises(RuntimeError, match="without defer"):
        gradient_work(p).withdraw()
