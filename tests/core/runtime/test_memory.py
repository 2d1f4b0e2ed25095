"""Memory that stays: what is freed and allocated again costs no page faults, and what is kept has huge pages."""

from __future__ import annotations

import platform
import re
import resource
from pathlib import Path

import pytest
import torch

import tpcore
from tpcore.runtime.memory import in_huge_pages

GLIBC = platform.libc_ver()[0] == "glibc"
pytestmark = pytest.mark.processes


def _faults(times: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(16 << 20)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _again() -> tuple[int, int]:
    return _faults(1), _faults(3)


@pytest.mark.slow
def test_a_rank_that_launch_starts_keeps_what_it_freed() -> None:
    first, again = tpcore.launch(_again, nprocs=1)[0]
    if GLIBC:
        assert again < 2 * first  # three times where each is mapped anew


def test_copies_side_by_side_are_equal_and_apart() -> None:
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "half": torch.randn(5, 7).bfloat16(),
        "large": torch.randn(1024, 1024),
    }
    copies = in_huge_pages(tensors)
    assert all(torch.equal(copies[name], t) and copies[name].dtype == t.dtype for name, t in tensors.items())
    assert {t.data_ptr() % 64 for t in copies.values()} == {0}
    copies["bytes"].zero_()
    assert copies["one"] == 2.5
    assert tensors["bytes"].tolist() == [0, 1, 2]
    assert in_huge_pages({}) == {}
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        tensors = {"much": torch.ones(8 << 20)}  # 32 MiB, of which the kernel may have few huge pages to give
        before = _huge()
        copies = in_huge_pages(tensors)
        assert _huge() > before


def _huge() -> int:
    """This process's anonymous memory in huge pages, in KiB."""
    found = re.search(r"^AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1])
