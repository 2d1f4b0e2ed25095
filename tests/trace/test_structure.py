"""Nested values are taken apart and put together again; what does not match is named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from tpcore.trace.structure import ModelOutput, match, names_of, put_together, take_apart

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Held:
    logits: Any
    loss: Any = None


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, B),
        [A, (B, None), {"c": C}],
        {"a": A, "more": {"b": [B]}, "n": 3, "s": "x", "f": 0.5, "t": True},
        None,
        (),
    ],
)
def test_there_and_back(value: Any) -> None:
    leaves, form = take_apart(value, "x")
    again = put_together(json.loads(json.dumps(form)), leaves)
    assert again == value or again is value
    assert len(names_of(form, "x")) == len(leaves)
    assert [id(t) for t in match(form, value, "x")] == [id(t) for t in leaves]


@pytest.mark.parametrize("value", [Pair(A, B), Held(A, B), ModelOutput(first=A, second=B)])
def test_outputs_with_attributes(value: Any) -> None:
    leaves, form = take_apart(value, "x")
    made = put_together(form, leaves)
    names = list(made)
    assert made[0] is A
    assert getattr(made, names[0]) is A
    assert made[names[1]] is B
    assert made[:1] == (A,)
    assert made.to_tuple() == (A, B)
    with pytest.raises(AttributeError, match=r"no 'third'; it has \['"):
        made.third  # noqa: B018  the access is the test


def test_names_say_where() -> None:
    _, form = take_apart({"ids": A, "states": [B, (C,)], "more": {"mask": A}}, "")
    assert names_of(form) == ["ids", "states[0]", "states[1][0]", "more['mask']"]


@pytest.mark.parametrize(
    ("value", "message"), [(object(), "x is a object"), ([A, {1, 2}], r"x\[1\] is a set"), ({1: A}, "x has the key 1")]
)
def test_what_cannot_be_traced(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        take_apart(value, "x")


@pytest.mark.parametrize(
    ("traced", "given", "error", "message"),
    [
        (A, 3, TypeError, "x must be a tensor, not a int"),
        ((A, B), (A,), TypeError, "x must be a tuple of 2, as it was traced, not a tuple of 1"),
        ([A], {"a": A}, TypeError, "x must be a list of 1, as it was traced, not one with"),
        ({"a": A}, {"b": A}, TypeError, r"x must be a dict with the keys \['a'\]"),
        (0.5, 0.25, ValueError, r"x=0.25, and the model was traced with 0.5"),
        (True, 1, ValueError, r"x=1, and the model was traced with True"),
    ],
)
def test_what_does_not_match(traced: Any, given: Any, error: type[Exception], message: str) -> None:
    _, form = take_apart(traced, "x")
    with pytest.raises(error, match=message):
        match(form, given, "x")
