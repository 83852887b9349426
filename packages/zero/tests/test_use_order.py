"""What is used next, as far as it is known from last time."""

from __future__ import annotations

from shardweave.zero.use_order import REDUCTION, Use, UseOrder


def numbers(text: str) -> list[Use]:
    """``0 1 1b 0b r``: forward, backward and reduction."""
    words = text.split()
    return [REDUCTION if word == "r" else Use(int(word[0]), word.endswith("b")) for word in words]


def noted(text: str) -> tuple[UseOrder, list[bool]]:
    order = UseOrder()
    return order, [order.note(use) for use in numbers(text)]


def test_a_step_is_foreseen_from_the_one_before() -> None:
    step = "0 1 2 2b 1b 0b r "
    order, found = noted(2 * step)
    # Known by two uses: before the second step comes another than before the first.
    assert found == 9 * [False] + 5 * [True]
    assert list(order.foreseen(9)) == numbers("0 1 2 2b 1b 0b")
    assert (order.before, order.last) == (Use(0, True), REDUCTION)


def test_what_is_foreseen_ends_with_the_pass_and_the_step() -> None:
    order, _ = noted("0 1 2 2b 1b 0b r 0 1 2 2b 1b 0b r 0 1")
    assert list(order.rest_of_pass(9)) == numbers("2")
    assert list(order.foreseen(3)) == numbers("2 2b 1b")
    assert list(order.foreseen(9)) == numbers("2 2b 1b 0b")
    order.note(Use(2, False))
    assert list(order.rest_of_pass(9)) == []


def test_a_unit_used_twice_and_an_order_that_changes() -> None:
    order, _ = noted("0 1 0 2 0b r 0 1 0")
    assert next(order.foreseen(1)) == Use(2, False)  # the 0 behind the 1, not the one behind a reduction
    assert not order.note(Use(1, False))
    assert next(order.foreseen(1)) == Use(0, False)
    circles, _ = noted("1 1 1 1")
    assert list(circles.foreseen(3)) == numbers("1 1 1")


def test_before_anything_was_used() -> None:
    order = UseOrder()
    assert (order.before, order.last) == (None, None)
    assert list(order.foreseen(2)) == list(order.rest_of_pass(2)) == []


def test_uses_in_words_differ_as_the_uses_do() -> None:
    """Ranks compare them."""
    uses = [Use(0, False), Use(0, False, False), Use(0, True, False), Use(0, True), Use(1, False), REDUCTION]
    order, words = UseOrder(), []
    for use in uses:
        order.note(use)
        words.append(order.in_words(["first", "second"]).split(" after ")[0])
    assert words == [
        "first",
        "first, without gradients,",
        "first in a backward pass",
        "first in a backward pass, recorded,",
        "second",
        "nothing before gradients are reduced",
    ]
    order.note(Use(1, False))
    assert order.in_words(["first", "second"]) == "second after the last reduction"
