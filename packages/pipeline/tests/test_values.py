"""Headers of messages."""

from __future__ import annotations

import pytest
import torch

from shardweave.pipeline.values import HEADER_LENGTH, Value, decode, encode, signature_of, tensors_of


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 4),
        torch.zeros((), dtype=torch.float64, requires_grad=True),
        (torch.zeros(2, 0, 5), torch.ones(7, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)),
        (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True),),
        (),
    ],
)
def test_headers_round_trip(value: Value) -> None:
    signature = signature_of(value)
    header = encode(signature, "it")
    assert header.shape == (HEADER_LENGTH,)
    assert decode(header) == signature
    assert decode(header).is_tuple == isinstance(value, tuple)


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


def test_a_tuple_of_other_things_is_refused() -> None:
    with pytest.raises(ValueError, match="is a tuple of Tensor, NoneType"):
        tensors_of((torch.zeros(1), None), "it")
