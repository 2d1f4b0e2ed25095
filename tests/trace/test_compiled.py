"""Programs that inductor compiles while they are traced: the graph's numbers and errors, and the graph elsewhere."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool
from torch import Tensor
from tpcore_cpu_gloo import compiled
from tpcore_cpu_gloo.programs import GRAPH

from tpcore import Mesh, PeerLostError
from tpcore.backend.interface import DynamicDim
from tpcore.layers.embedding import check_ids
from tpcore.runtime.context import ParallelContext

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: inductor compiles with it"),
]


def _numbers_and_errors(ctx: ParallelContext, folder: Path, worth: float) -> None:
    comm, weights = ctx.comm("tp"), {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4) * (1 + ctx.rank)}

    def fn(weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        check_ids(inputs[1], 5, "the test")
        return [comm.all_reduce(F.gelu(inputs[0] @ weights["w"])), inputs[1] + 1]

    def inputs(rows: int) -> list[Tensor]:
        return [torch.linspace(0, 2, 3 * rows, dtype=torch.float64).reshape(rows, 3), torch.arange(rows) % 5]

    dims = [{0: DynamicDim("rows", 1, 9)}] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPCORE_INDUCTOR", "1")
        patch.setattr(compiled, "WORTH", worth)
        ctx.backend.trace(fn, weights, inputs(4), dims, folder)
    ctx.world.all_reduce(torch.ones(1))
    assert (folder / compiled.CODE).exists() == (worth > 0)
    for elsewhere in (False, True):
        ctx.world.all_reduce(torch.ones(1))
        said = json.loads((folder / GRAPH).read_text())
        if elsewhere and said["compiled"]:
            said["compiled"]["flags"].append("unobtainium")
            ctx.world.all_reduce(torch.ones(1))
            (folder / GRAPH).write_text(json.dumps(said))  # each rank the same
            assert compiled.missing(said["compiled"]) == "a processor with unobtainium"
        ctx.world.all_reduce(torch.ones(1))
        program = ctx.backend.load_program(folder, weights)
        for rows in (4, 1, 7):
            x, ids = inputs(rows)
            got, more = program([x, ids])
            torch.testing.assert_close(got, comm.all_reduce(F.gelu(x @ weights["w"])), rtol=1e-14, atol=1e-14)
            assert torch.equal(more, ids + 1)
        with pytest.raises(IndexError, match="the test: an id does not fit a vocabulary of 5"):
            program([inputs(2)[0], torch.tensor([0, 5])])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(comm.transport), "all_reduce", _lost)
            with pytest.raises(PeerLostError, match="rank 1 went"):
                ctx.backend.load_program(folder, weights)(inputs(2))


def _lost(*_: object) -> Tensor:
    raise PeerLostError("rank 1 went")


@pytest.mark.parametrize("worth", [math.inf, 0.0], ids=["kept", "no gain"])
def test_numbers_and_errors_are_those_of_the_graph(pool: RankPool, tmp_path: Path, worth: float) -> None:
    pool.run(Mesh({"pp": 1, "dp": 1, "tp": 2}), _numbers_and_errors, tmp_path, worth)
