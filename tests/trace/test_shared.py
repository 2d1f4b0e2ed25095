"""Tensors through memory that two processes share; here, two maps of it."""

from __future__ import annotations

import os

import pytest
import torch

from tpcore.processes.shared_memory import Place, SharedBuffer, fill


def put(buffer: SharedBuffer, tensors: list[torch.Tensor]) -> tuple[Place, ...]:
    places = buffer.place(tensors)
    for view, t in zip(buffer.get(places), tensors, strict=True):
        view.copy_(t)
    return places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_the_other_side_reads_what_was_put(dtype: torch.dtype) -> None:
    writer = SharedBuffer()
    reader = SharedBuffer(os.dup(writer.fd))
    for size in (3, 5000, 7):  # it grows, and stays grown
        sent = [torch.arange(size).to(dtype), torch.ones(size, 2).to(dtype).t(), torch.empty(0, 4).to(dtype)]
        got = reader.get(put(writer, sent))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, sent, strict=True))
    for side in (writer, reader):
        side.close()


def test_nothing_of_it_has_a_name() -> None:
    buffer = SharedBuffer()
    put(buffer, [torch.zeros(10)])
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{buffer.fd}")
    buffer.close()


def test_memory_keeps_nothing_of_the_graph_behind_a_tensor() -> None:
    buffer, x = SharedBuffer(), torch.ones(3, requires_grad=True)
    for inside in (True, False):
        with torch.inference_mode(inside):  # the first to see the memory leaves no mark on it
            views = buffer.get(buffer.place([x]))
            fill(views, [2 * x])
    assert views[0].tolist() == [2.0] * 3
    assert views[0].grad_fn is None
    assert not views[0].requires_grad
    buffer.close()
