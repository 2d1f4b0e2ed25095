"""What scripts call of torch_xla, under its names: collectives, means, files, loaders and processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.worlds import each_rank
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_nxd.optimizer import NeuronZero1Optimizer
from tpcore_nxd.parallel_layers import parallel_state as ps
from tpcore_nxd.xla.core import xla_model as xm
from tpcore_nxd.xla.distributed import parallel_loader as pl
from tpcore_nxd.xla.distributed import xla_multiprocessing as xmp
from tpcore_nxd.xla.distributed import zero_redundancy_optimizer as zero

MESH = Mesh({"pp": 1, "dp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("kind", "dtype", "want"),
    [
        (xm.REDUCE_SUM, torch.float32, [10, 6]),
        (xm.REDUCE_MUL, torch.int64, [24, 8]),
        (xm.REDUCE_MIN, torch.uint8, [1, 2]),
        (xm.REDUCE_MAX, torch.float64, [4, 4]),
        (xm.REDUCE_AND, torch.int32, [0, 0]),
        (xm.REDUCE_OR, torch.int64, [7, 6]),
        (xm.REDUCE_AND, torch.bool, [1, 1]),
    ],
)
@pytest.mark.parametrize("groups", [None, [[0, 2], [3, 1]]])
@each_rank(pp=1, dp=2, tp=2)
def test_reductions(ctx: ParallelContext, kind: str, dtype: torch.dtype, want: list[int], groups: Any) -> None:
    """Ranks have 1 to 4: of all, and of ranks 1 and 3, which is a group of the mesh in another order."""
    own = torch.tensor([ctx.rank + 1]).to(dtype)
    kept = own.clone()
    if groups is None or ctx.rank in groups[1]:
        assert xm.all_reduce(kind, own, groups=groups).tolist() == [want[groups is not None]]
    else:
        xm.all_reduce(kind, own, groups=groups)
    assert torch.equal(own, kept)
    listed = [own, own.clone()]
    assert xm.all_reduce(kind, listed, scale=1.0, groups=groups, pin_layout=False) is listed
    assert torch.equal(listed[0], xm.all_reduce(kind, kept, groups=groups))


def test_groups_lists_and_orders() -> None:
    def ask(ctx: ParallelContext) -> None:
        own = torch.tensor([float(ctx.rank)])
        assert xm.all_reduce("sum", own, scale=0.25).item() == 1.5
        assert xm.all_gather(own, groups=[[0, 3], [1, 2]]).tolist() == ([0, 3] if ctx.rank in (0, 3) else [1, 2])
        assert xm.all_gather(own, 0, None, torch.empty(4)).tolist() == [0, 1, 2, 3]
        assert xm.rendezvous("here", str(ctx.rank).encode()) == [b"0", b"1", b"2", b"3"]
        assert xm.mesh_reduce("sum", {"a": own}, lambda all_: sum(x["a"].item() for x in all_)) == 6
        for wrong in ([[0, 1]], [[0, 1, 2], [3]], [[0, 1], [1, 2]]):
            with pytest.raises(ValueError, match="each of the 4 ranks once"):
                xm.all_reduce("sum", own, groups=wrong)

    run_ranks(MESH, ask)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "reduction": (lambda: xm.all_reduce("mean", torch.ones(1)), "one of sum, max"),
    "bits of floats": (lambda: xm.all_reduce("and", torch.ones(1)), "pass x != 0"),
    "bits of complex": (lambda: xm.all_reduce("or", [torch.ones(1, dtype=torch.complex64)]), "pass x != 0"),
    "payload": (lambda: xm.rendezvous("a", "text"), r"text.encode\(\)"),  # type: ignore[arg-type]
    "device": (lambda: xm.xla_device(1), "one device"),
    "replicas": (lambda: xm.rendezvous("a", replicas=[0]), "all 4 ranks meet"),
    "groups": (lambda: xm.reduce_gradients(sgd(), groups=[[0, 1], [2, 3]]), "a mean over dp"),
    "save": (lambda: xm.save({"a": [torch.ones(1)]}, "never"), "a part of the model"),
    "save of a model": (lambda: xm.save(torch.nn.Linear(1, 1), "never"), "a part of the model"),
    "sharding": (lambda: pl.MpDeviceLoader([], "cpu", input_sharding=1), "input_sharding"),  # type: ignore[arg-type]
    "join": (lambda: xmp.spawn(print, join=False), "join=False"),
}


@pytest.mark.parametrize("name", REFUSED)
@each_rank(pp=1, dp=2, tp=2)
def test_refused(ctx: ParallelContext, name: str) -> None:
    call, match = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def sgd(p: torch.Tensor | None = None) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2)) if p is None else p], lr=1.0)


@pytest.mark.parametrize("groups", ["none", "dp"])
@pytest.mark.parametrize("how", ["step", "by hand", "zero"])
@each_rank(pp=1, dp=2, tp=2)
def test_gradients_are_a_mean_over_dp(ctx: ParallelContext, how: str, groups: str) -> None:
    """dp ranks have gradients 1 and 3: the weight moves by 2, whatever tp is, and by ZeRO-1's own step once."""
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.full_like(p, 1.0 + 2 * ctx.coord("dp"))
    optimizer: Any = sgd(p)
    if how == "zero":
        optimizer = zero.ZeroRedundancyOptimizer([p], torch.optim.SGD, lr=1.0, grad_clipping=False, pin_layout=True)
        assert isinstance(optimizer, NeuronZero1Optimizer)
    of = None if groups == "none" else ps.get_data_parallel_replica_groups()
    if how == "by hand":
        xm.reduce_gradients(optimizer, groups=of)
        optimizer.step()
    else:
        assert xm.optimizer_step(optimizer, True, {"closure": None}, of) is None
    assert p.tolist() == [-2.0, -2.0]


def test_files(tmp_path: Path) -> None:
    """The job's first rank writes alone; without tp each rank has the whole."""

    def write(ctx: ParallelContext) -> None:
        xm.save({"a": [torch.full((1,), ctx.rank)]}, tmp_path / "one", global_master=True)
        xm.rendezvous("saved")
        xm.save([ctx.rank], tmp_path / f"each{ctx.rank}", master_only=False)

    run_ranks(Mesh({"pp": 1, "dp": 2, "tp": 1}), write)
    assert torch.load(tmp_path / "one") == {"a": [torch.zeros(1)]}
    assert [torch.load(tmp_path / f"each{rank}") for rank in (0, 1)] == [[0], [1]]


class Pair(NamedTuple):
    x: Any
    y: Any


def test_a_loader_moves_batches_of_every_kind() -> None:
    batches = [{"a": torch.ones(1), "b": [torch.ones(1), "text"]}, Pair(torch.ones(1), None), torch.ones(1), 3]
    found = BaseModelOutput(last_hidden_state=torch.ones(1)), BatchEncoding({"a": torch.ones(1)})
    loader = pl.MpDeviceLoader([*batches, *found], torch.device("meta"), loader_prefetch_size=1)
    mapping, pair, tensor, number, output, encoding = loader
    assert (len(loader), loader.index(3), number) == (6, 3, 3)  # an attribute of the loader's
    assert isinstance(pair, Pair)
    assert (type(output), type(encoding)) == (BaseModelOutput, BatchEncoding)
    assert {output[0].device.type, encoding["a"].device.type} == {"meta"}
    assert {found[0][0].device.type, found[1]["a"].device.type} == {"cpu"}
    assert {t.device.type for t in (mapping["a"], mapping["b"][0], pair.x, tensor)} == {"meta"}
    assert batches[0]["a"].device.type == "cpu"  # type: ignore[index,call-overload]


def test_names_before_initialization(capsys: pytest.CaptureFixture[str]) -> None:
    xm.master_print("a", 1, flush=True)
    xm.master_print("b", local=True, fd=sys.stdout)
    xm.add_step_closure(print, ("now",), run_async=True)
    xm.mark_step(wait=True)
    xm.wait_device_ops()
    assert capsys.readouterr().out == "a 1\nb\nnow\n"
    assert (xm.get_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal(), xm.rendezvous("x", b"y")) == (
        0,
        1,
        True,
        [b"y"],
    )
    x = torch.ones(1, requires_grad=True)
    xm.checkpoint(torch.square, x).backward()
    assert x.grad is not None
    assert x.grad.item() == 2


SCRIPT = """\
import os, sys
import torch, torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

def main(index, first):
    x = torch.full((2,), float(xr.global_ordinal() + first), device="xla")
    total = xm.all_reduce(xm.REDUCE_SUM, x)
    xm.master_print(f"{xr.world_size()} ranks: {total.tolist()}", flush=True)
    xm.rendezvous("done")

if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE"):
        dist.init_process_group("xla", init_method="pjrt://")
        print(f"[{dist.get_rank()}]", flush=True)
        main(0, 1)
    else:
        xmp.spawn(main, args=(1,), nprocs=int(sys.argv[1]))
"""


@pytest.mark.parametrize("how", [*(pytest.param(h, marks=pytest.mark.slow) for h in ("torchrun", "spawn")), "alone"])
def test_a_script_without_neuronx_distributed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shipped but for what ``tpcore migrate`` rewrites: its own group named "xla", or processes of its own."""
    from tpcore_nxd.migrate.script import Script

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPCORE_BACKEND", "cpu_gloo")
    script = Script(SCRIPT)
    assert (script.stays, script.by_hand) == (0, 0)
    path = tmp_path / "s.py"
    path.write_text(script.rewritten())
    starter = ["-m", "torch.distributed.run", "--nproc_per_node=2"] if how == "torchrun" else []
    command = [sys.executable, *starter, str(path), "1" if how == "alone" else "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("1 ranks: [1.0, 1.0]" if how == "alone" else "2 ranks: [3.0, 3.0]") in done.stdout
