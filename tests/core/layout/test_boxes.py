"""A run of a tensor's entries as boxes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpcore.layout.slices import narrowed, slabs


@settings(max_examples=300)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_run_of_entries_is_boxes_in_their_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers, boxes = torch.arange(total).reshape(shape), list(slabs(shape, start, stop))
    seen = [n for at, size in boxes for n in narrowed(numbers, at, size).flatten().tolist()]
    assert seen == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) + 1
