"""What a recording tells of a step's data: seeds and inputs that tp ranks should share."""

from __future__ import annotations

import re

import pytest
import torch
from test_mistakes import GIVEN, Model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tpcore


def _built_with(seed: int, ids: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    return Model(), (ids, GIVEN[1])


@pytest.mark.parametrize(
    ("seed", "batch", "says"),
    [
        (1, 0, "differ in the random state for the initial weight of ParallelEmbedding at .*test_mistakes"),
        (0, 1, r"differ in input 0 of Model\. .*the same batch and the same seed"),
    ],
)
def test_a_recording_tells_which_ranks_of_one_group_have_other_data(seed: int, batch: int, says: str) -> None:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        ctx = tpcore.current()
        odd = ctx.rank == 3
        return _built_with(seed * odd, (GIVEN[0] + ctx.coord("dp") + batch * odd) % 5)

    (found,) = tpcore.explain(build, tp=2, dp=2).mistakes
    assert re.search(f"ranks 2 and 3 of one tp group {says}", found), found


def test_a_recording_tells_nothing_of_inputs_that_differ_at_each_call() -> None:
    batches = iter(range(9))
    found = tpcore.explain(lambda: _built_with(0, (GIVEN[0] + next(batches)) % 5), tp=2)
    assert found.mistakes == ()


def test_a_recording_says_what_to_do_about_torchs_data_parallelism() -> None:
    with pytest.raises(ValueError, match=r"rank 0 needs .* at .*test_explain_data.*take the parts of tp ranks"):
        tpcore.explain(lambda: (DistributedDataParallel(Model()), GIVEN), tp=2)
