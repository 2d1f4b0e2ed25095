"""Memory that stays: a large tensor that is freed and allocated again costs no page faults."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

import tpcore

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
