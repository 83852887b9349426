"""Headers of messages."""

from __future__ import annotations

import pytest
import torch

from shardweave.pipeline.values import HEADER_LENGTH, Headers, Value, decode, encode, signature_of, tensors_of


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 4),
        torch.zeros((), dtype=torch.float64, requires_grad=True),
        (torch.zeros(2, 0, 5), torch.ones(7, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)),
        (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True),),
        (),
        {"hidden_states": torch.zeros(2, 3, requires_grad=True), "mask": torch.ones(2, dtype=torch.bool)},
        {"": torch.zeros(1), "\xfcber_acht_zeichen_lang": torch.zeros(1), "8_zeich.": torch.zeros(())},
    ],
)
def test_headers_round_trip(value: Value) -> None:
    signature = signature_of(value)
    header = encode(signature, "it")
    assert header.shape == (HEADER_LENGTH,)
    assert decode(header) == signature
    assert decode(header).is_tuple == isinstance(value, tuple)
    assert decode(header).names == (tuple(value) if isinstance(value, dict) else None)


def test_gradients_are_those_of_the_tensors_that_require_one() -> None:
    value = (torch.zeros(2, 3, requires_grad=True), torch.zeros(4), torch.zeros(5, requires_grad=True))
    shapes = [tuple(buffer.shape) for buffer in signature_of(value).empty_gradients(torch.device("cpu"))]
    assert shapes == [(2, 3), (5,)]


def test_more_than_a_header_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 3: 40 tensors with 80 dims"):
        encode(signature_of(tuple(torch.zeros(1, 1) for _ in range(40))), "stage 3")


def test_a_dtype_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage 3: torch\.float8_e5m2 cannot be passed"):
        encode(signature_of(torch.zeros(1).to(torch.float8_e5m2)), "stage 3")


@pytest.mark.parametrize("value, name", [([torch.zeros(1)], "list"), (None, "NoneType"), ({}, "dict")])
def test_other_values_are_refused(value: object, name: str) -> None:
    with pytest.raises(ValueError, match=f"the output of stage 1 is a {name}"):
        tensors_of(value, "the output of stage 1")


def test_names_that_a_header_does_not_hold_are_refused() -> None:
    value = {"x" * 1000: torch.zeros(1)}
    with pytest.raises(ValueError, match=r"a name takes 1 \+ 1 per 8 bytes"):
        encode(signature_of(value), "stage 3")


def test_a_signature_describes_what_has_the_same_one() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)
    values: list[Value] = [
        x, y, x.double(), torch.zeros(3, 2), (x,), (x, x), (x, y), (),
        {"x": x}, {"y": x}, {"x": x, "y": y}, {"y": x, "x": y},
    ]  # fmt: skip
    for one in values:
        assert [signature_of(one).describes(other) for other in values] == [one is other for other in values]
    assert signature_of(x).describes(torch.ones(2, 3))


def test_headers_are_remembered_and_forgotten() -> None:
    headers, cpu = Headers(), torch.device("cpu")
    first = signature_of(torch.zeros(3))
    header = headers.encode(first, "it", cpu)
    assert headers.encode(signature_of(torch.ones(3)), "it", cpu) is header
    assert headers.decode(header) is headers.decode(header.clone())
    for length in range(600):
        other = signature_of(torch.zeros(length))
        assert headers.decode(headers.encode(other, "it", cpu)) == other
    assert torch.equal(headers.encode(first, "it", cpu), header)


@pytest.mark.parametrize("value", [{"x": 1.0}, {1: torch.zeros(1)}])
def test_a_dict_of_other_things_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"is a dict of ('x': float|1: Tensor)"):
        tensors_of(value, "it")


def test_a_tuple_of_other_things_is_refused() -> None:
    with pytest.raises(ValueError, match="is a tuple of Tensor, NoneType"):
        tensors_of((torch.zeros(1), None), "it")
