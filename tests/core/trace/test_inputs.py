"""Which calls a traced model takes, what the others are told, and how nested values are taken apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from tpcore.backend.interface import DynamicDim
from tpcore.trace.inputs import Arguments, Inputs, ModelOutput, match, names_of, put_together, take_apart
from tpcore.trace.make.dynamic import by_example, declared, output_shapes

X, Y = torch.zeros(2, 5), torch.ones(2, 5)


def plain(ids: Any, mask: Any = None, scale: float = 1.0, *, extra: Any = None) -> None: ...


def starred(*tensors: Any, **options: Any) -> None: ...


def positional(ids: Any, /, mask: Any) -> None: ...


@pytest.mark.parametrize(
    ("forward", "traced", "call"),
    [
        (plain, ((X, Y), {}), ((X, Y), {})),
        (plain, ((X, Y), {}), ((X,), {"mask": Y})),
        (plain, ((), {"mask": Y, "ids": X}), ((X, Y), {})),
        (plain, ((X,), {"extra": Y}), ((), {"extra": Y, "ids": X})),
        (plain, ((X, Y), {}), ((X, Y, 1.0), {"extra": None})),
        (plain, ((X, Y), {"scale": 2.0}), ((X, Y), {})),
        (plain, ((X, Y), {"scale": 2.0}), ((X, Y, 2.0), {})),
        (starred, ((X, Y), {}), ((X, Y), {})),
        (starred, ((X,), {"b": Y}), ((X,), {"b": Y})),
        (positional, ((X, Y), {}), ((X,), {"mask": Y})),
        (plain, (({"a": X, "b": [Y]},), {}), (({"b": [Y], "a": X},), {})),
    ],
)
def test_calls_of_the_traced_form(forward: Callable[..., None], traced: Any, call: Any) -> None:
    arguments, leaves = Arguments.of(forward, *traced)
    again = Arguments.from_json(json.loads(json.dumps(arguments.to_json())))
    assert again == arguments
    assert {id(t) for t in again.bind(*call)} == {id(X), id(Y)}
    assert [id(t) for t in again.bind(*traced)] == [id(t) for t in leaves]


@pytest.mark.parametrize(
    ("forward", "traced", "call", "error", "message"),
    [
        (plain, ((X, Y), {}), ((X,), {}), TypeError, r"missing argument 'mask'.*\['ids', 'mask'\]"),
        (plain, ((X,), {"extra": Y}), ((), {}), TypeError, "missing argument 'ids'"),
        (plain, ((X,), {}), ((X, Y), {}), TypeError, "argument 'mask' was not given when"),
        (plain, ((X,), {}), ((X,), {"scale": 2.0}), TypeError, "argument 'scale' was not given when"),
        (plain, ((X,), {}), ((X,), {"nope": 2.0}), TypeError, "unexpected keyword argument 'nope'"),
        (plain, ((X,), {"scale": 2.0}), ((X, None, 3.0), {}), ValueError, "scale=3.0, and the model was"),
        (starred, ((X, Y), {}), ((X,), {}), TypeError, "tensors must be a tuple of 2"),
        (plain, ((X,), {}), ((X, Y, 1, 2, 3), {}), TypeError, "too many positional"),
    ],
)
def test_other_calls(
    forward: Callable[..., None], traced: Any, call: Any, error: type[Exception], message: str
) -> None:
    arguments, _ = Arguments.of(forward, *traced)
    with pytest.raises(error, match=message):
        arguments.bind(*call)


def make(dynamic: Any = None, *examples: tuple[Tensor, ...]) -> Inputs:
    arguments, leaves = Arguments.of(plain, (X, Y), {})
    dtypes = X.dtype, Y.dtype
    if examples:
        made = Inputs(arguments, dtypes, *by_example(arguments, examples))
    else:
        made = Inputs(arguments, dtypes, *declared(dynamic, arguments, leaves))
    assert Inputs.from_json(json.loads(json.dumps(made.to_json()))) == made
    return made


ROWS = Dim("rows", min=1, max=4)


@pytest.mark.parametrize(
    "said",
    [
        {"ids": {0: ROWS, 1: "length"}, "mask": {0: ROWS, 1: "length"}},
        ({0: ROWS, 1: "length"}, {0: ROWS, 1: "length"}),
        {"ids": [ROWS, "length"], "mask": (ROWS, "length")},
    ],
)
def test_dynamic_dimensions(said: Any) -> None:
    inputs = make(said)
    assert inputs.shapes == (("rows", "length"), ("rows", "length"))
    assert inputs.dims == {"rows": DynamicDim("rows", 1, 4), "length": DynamicDim("length", 1, None)}
    assert inputs.sizes([torch.zeros(3, 70), torch.zeros(3, 70)]) == {"rows": 3, "length": 70}
    for ids, mask in (((5, 5), (5, 5)), ((2, 5), (2, 6)), ((2, 5, 1), (2, 5)), ((0, 5), (0, 5))):
        with pytest.raises(ValueError, match=r"no program takes ids \[.*where rows \(from 1 to 4\), length"):
            inputs.sizes([torch.zeros(ids), torch.zeros(mask)])


def test_what_is_static_stays_so() -> None:
    inputs = make()
    assert inputs.sizes([X, Y]) == {}
    with pytest.raises(ValueError, match=r"ids \[2, 6\], mask \[2, 5\]; the model was traced for ids \[2, 5\]"):
        inputs.sizes([torch.zeros(2, 6), Y])
    with pytest.raises(TypeError, match=r"mask is of torch.int64, and the model was traced with torch.float32"):
        inputs.sizes([X, Y.long()])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"nope": {0: ROWS}}, r"has 'nope'; the traced arguments are \['ids', 'mask'\]"),
        (({0: ROWS},), "one entry for each of"),
        ({"ids": {2: ROWS}}, r"no dim 2 in ids of shape \[2, 5\]"),
        ({"ids": {0: Dim.AUTO}}, "give a torch.export.Dim"),
        ({"ids": {0: 2 * ROWS}}, "give a torch.export.Dim"),
        ({"ids": {0: Dim("b", min=3)}}, r"dim 0 is outside of b \(from 3 on\)"),
        ({"ids": {0: Dim("b", max=4)}, "mask": {0: Dim("b", max=5)}}, "'b' has two ranges"),
        ({"ids": 3}, "must be a dict from dimension to Dim"),
    ],
)
def test_what_dynamic_shapes_cannot_say(said: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(said)


def test_buckets() -> None:
    inputs = make(None, *((torch.zeros(b, n), torch.zeros(b, n)) for b, n in ((1, 4), (1, 8), (3, 8))))
    choose = lambda *shape: inputs.program(  # noqa: E731  shorter here
        inputs.sizes([torch.ones(shape)] * 2), [torch.ones(shape)] * 2
    )
    assert [choose(1, 4), choose(1, 2), choose(1, 5), choose(2, 3), choose(3, 8)] == [0, 0, 1, 2, 2]
    padded = inputs.padded(torch.ones(2, 3), 1, 2, 7.0)
    assert padded.shape == (3, 8)
    assert torch.equal(padded[:2, :3], torch.ones(2, 3))
    assert float(padded.sum()) == 6 + 7 * (24 - 6)
    for shape in ((4, 4), (1, 9), (0, 3)):
        with pytest.raises(ValueError, match="sizes up to those of one of: ids dim 0 1, ids dim 1 4; ids dim"):
            choose(*shape)
    with pytest.raises(ValueError, match="no program takes"):
        inputs.sizes([torch.ones(1, 3), torch.ones(1, 4)])  # which the model would not take either


def test_outputs_are_cut_where_padding_shows() -> None:
    buckets = ({"b": 1, "s": 4}, {"b": 2, "s": 8})
    assert output_shapes([[[1, 4, 5], [4]], [[2, 8, 5], [4]]], buckets) == (("b", "s", 5), (4,))
    with pytest.raises(ValueError, match=r"output 0 has the sizes \[5, 9\] in dim 0, which are those of no"):
        output_shapes([[[5]], [[9]]], buckets)
    assert output_shapes([[[3, 4]]], ()) == ((3, 4),)


def test_examples_of_buckets_that_differ_in_kind() -> None:
    with pytest.raises(ValueError, match="bucket_inputs: mask differs in more than sizes"):
        make(None, (X, Y), (X, Y.long()))


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
