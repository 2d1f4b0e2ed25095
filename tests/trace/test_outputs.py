"""OutputBuffers lie in memory that a rank has written, and are the caller's own; here, both sides at once."""

from __future__ import annotations

import ctypes
import gc
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from tpcore.trace.serve.outputs import OUTPUT_BUFFERS, OutputBuffers, RankBuffer

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


class Both:
    """A call of this is one of a model that returns its inputs."""

    def __init__(self) -> None:
        self.outputs = OutputBuffers()
        self.rank = [RankBuffer(os.dup(b.fd)) for b in self.outputs.buffers]
        self.used: list[int] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        n = self.outputs.free()
        self.used.append(n)
        expected = self.outputs.buffers[n].expected()
        return self.outputs.taken(n, self.rank[n].put(tensors), expected)


@pytest.fixture
def model() -> Iterator[Both]:
    both = Both()
    yield both
    both.outputs.close()
    for rank in both.rank:
        rank._buffer.close()


def numbers(start: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).to(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_what_was_returned(model: Both, dtype: torch.dtype) -> None:
    for size in (3, 5000, 7, 0, 3):  # the memory grows, and stays grown
        sent = [
            numbers(size, size, dtype=dtype),
            torch.ones(size, 2).to(dtype).t(),
            torch.empty(0, 4).to(dtype),
        ]
        for _ in range(2):
            got = model(*sent)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, sent, strict=True))
            assert all(t.is_contiguous() and not t.is_inference() for t in got)
    assert model() == []


def test_a_loop_that_holds_the_last_output_copies_nothing(model: Both) -> None:
    for i in range(20):
        out = model(numbers(i, 1000))[0]
        assert torch.equal(out, numbers(i, 1000))
    assert set(model.used) == {0, 1}


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[2:3],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: from_dlpack(to_dlpack(t)),
        lambda t: [t],
    ],
    ids=["tensor", "view", "detached", "array", "storage", "bytes", "dlpack", "list"],
)
def test_what_is_held_is_never_written_again(model: Both, hold: Callable[[Tensor], Any]) -> None:
    def value(held: Any) -> Tensor:
        if isinstance(held, torch.UntypedStorage):
            return torch.tensor([], dtype=torch.float64).set_(held).clone()  # type: ignore[call-overload,no-any-return]
        return torch.as_tensor(held[0] if isinstance(held, list) else held).clone()

    held = [hold(model(numbers(100 * i, 50))[0]) for i in range(OUTPUT_BUFFERS + 3)]
    assert model.used == [*range(OUTPUT_BUFFERS), *[OUTPUT_BUFFERS] * 3]
    for i in range(5):
        model(numbers(-i, 50))
    for i, found in enumerate(held):
        want = numbers(100 * i, 50)
        assert torch.equal(value(found), want[2:3] if value(found).numel() == 1 else want)
    del held, found
    gc.collect()
    model.used.clear()
    model(numbers(0, 50))
    assert model.used == [0]


def test_what_the_caller_writes_is_its_own(model: Both) -> None:
    """Not to be found in the next output, nor by the rank, whose memory it is."""
    for i, pages in enumerate((20, 20, 2, 2, 20)):
        sent = numbers(i, pages * 512)
        out = model(sent)[0]
        assert torch.equal(out, sent)
        out[::3].fill_(-1.0)
        assert torch.equal(model.rank[model.used[-1]]._views[0], sent)
        del out
    assert set(model.used) == {0}


def test_what_the_caller_has_locked_into_memory(model: Both) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for i in range(3):
        out = model(numbers(i, 10))[0]
        assert torch.equal(out, numbers(i, 10))
        if libc.mlock(ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(out.nbytes)):
            pytest.skip(f"memory cannot be locked here: {os.strerror(ctypes.get_errno())}")
        out.zero_()
        del out


def test_each_has_a_storage_of_its_own(model: Both) -> None:
    """So that one of them is written to a file without the others."""
    small, large = model(numbers(0, 4), numbers(0, 100_000))
    written = io.BytesIO()
    torch.save(small, written)
    assert written.tell() < 5000
    assert small.untyped_storage().nbytes() == small.nbytes
    small.share_memory_().add_(1)
    assert torch.equal(small, numbers(1, 4))
    assert torch.equal(large, numbers(0, 100_000))


def test_memory_is_that_of_the_outputs_held_at_once(model: Both) -> None:
    for i in range(50):
        model(numbers(i, 100_000))
    files = [Path(f"/proc/self/fd/{b.fd}").stat().st_size for b in model.outputs.buffers]
    assert files == [800_000, 0, 0, 0]


def test_they_outlive_it() -> None:
    both = Both()
    out = both(numbers(0, 50))[0]
    both.outputs.close()
    del both
    gc.collect()
    assert torch.equal(out, numbers(0, 50))
