"""Programs that inductor compiles while they are traced: the graph's numbers and errors, and the graph elsewhere."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.rank_pool import RankPool
from torch import Tensor

from tpcore import BackendError, Mesh, PeerLostError
from tpcore.backend.interface import DynamicDim
from tpcore.layers.embedding import check_ids
from tpcore.runtime.context import ParallelContext
from tpcore.trace.programs import GRAPH
from tpcore_cpu_gloo import programs
from tpcore_cpu_gloo.programs import load

TP2 = Mesh({"pp": 1, "dp": 1, "tp": 2})


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
        patch.setattr(programs, "WORTH", worth)
        ctx.backend.trace(fn, weights, inputs(4), dims, folder)
    ctx.world.all_reduce(torch.ones(1))
    assert (folder / programs.CODE).exists() == (worth > 0)
    for elsewhere in (False, True):
        ctx.world.all_reduce(torch.ones(1))
        said = json.loads((folder / GRAPH).read_text())
        if elsewhere and said["compiled"]:
            said["compiled"]["flags"].append("unobtainium")
            ctx.world.all_reduce(torch.ones(1))
            (folder / GRAPH).write_text(json.dumps(said))  # each rank the same
            assert programs.missing(said["compiled"]) == "a processor with unobtainium"
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: inductor compiles with it")
@pytest.mark.parametrize("worth", [math.inf, 0.0], ids=["kept", "no gain"])
def test_numbers_and_errors_are_those_of_the_graph(pool: RankPool, tmp_path: Path, worth: float) -> None:
    pool.run(TP2, _numbers_and_errors, tmp_path, worth)


def _not_compiled(ctx: ParallelContext, folder: Path, fault: str) -> list[str]:
    """What is said, where the compiler fails, its code does not load, or finds other numbers on one rank."""

    def compile_(*_: Any, package_path: str, **__: Any) -> None:
        Path(package_path).write_bytes(b"code")
        if fault == "no compiler":
            raise RuntimeError("No working C++ compiler")

    def load(path: str) -> Any:
        if fault == "no code":
            raise OSError(f"{path} is no package")
        wrong = float(fault == "other numbers" and ctx.rank == 1)
        return lambda weights, positions, inputs: [inputs[0] * weights[0] + wrong]

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPCORE_INDUCTOR", "1")
        patch.setattr(torch._inductor, "aoti_compile_and_package", compile_)
        patch.setattr(torch._inductor, "aoti_load_package", load)
        patch.setattr(programs, "WORTH", math.inf)
        if fault == "no messages":
            patch.setattr(programs, "INTERFACE", Path(os.devnull))
        patch.setattr(programs, "inform", said.append)
        weights = {"w": torch.full((3,), 2.0)}
        ctx.backend.trace(lambda w, x: [x[0] * w["w"]], weights, [torch.ones(3)], [{}], folder)
    ctx.world.all_reduce(torch.ones(1))
    assert sorted(path.name for path in folder.iterdir()) == ["constants.safetensors", GRAPH]
    assert ctx.backend.load_program(folder, weights)([torch.ones(3)])[0].tolist() == [2.0] * 3
    return said


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no compiler", "RuntimeError: No working C++ compiler"),
        ("no messages", "has no messages in its errors: use a newer torch"),
        ("no code", "is no package"),
        ("other numbers", "AssertionError: Tensor-likes are not close"),
    ],
)
def test_the_graph_is_used_where_the_code_is_not_right(pool: RankPool, tmp_path: Path, fault: str, words: str) -> None:
    for (said,) in pool.run(TP2, _not_compiled, tmp_path, fault):
        assert said.startswith("trace: not compiled by inductor, the graph is used: ")
        assert words in said


def test_code_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / GRAPH).write_text(json.dumps({"weights": [], "groups": [], "compiled": programs.host()}))
    (tmp_path / programs.CODE).write_bytes(b"damaged")
    with pytest.raises(BackendError, match=r"compiled\.pt2 does not load here, trace the model again on this machine"):
        load(tmp_path, {}, lambda _: None)  # type: ignore[arg-type,return-value]
