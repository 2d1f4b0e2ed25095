"""Checkpoints of a 2 GB model at tp=2 against raw reads, writes and copies, and against torch's own ways.

What is saved and loaded is in the page cache, what is written goes to the disk.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tpcore
from tpcore import checkpoint
from tpcore.checkpoint.read.source import ShardRule
from tpcore_convert.rewrite import consolidate, reshard

from .harness import TP, Contestant, Race, check_equal, conditions, peak_bytes, race, say, start, table, touch

WIDTH, CHUNK = 4096, 8 << 20
NBYTES = WIDTH * WIDTH * 4


def dim_of(name: str) -> int:
    """Half of the layers are cut along rows, half along columns."""
    return 0 if int(name.partition(".")[0]) % 2 else 1


def build(layers: int) -> nn.Module:
    """64 MB each, whole."""
    with torch.device("meta"):
        model = nn.ModuleList(
            tpcore.ColumnParallelLinear(WIDTH, WIDTH, bias=False, gather_output=False)
            if dim_of(str(i)) == 0
            else tpcore.RowParallelLinear(WIDTH, WIDTH, bias=False, input_is_parallel=True)
            for i in range(layers)
        )
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.zero_()  # the memory is there before anything is timed
    return model


def memory(t: Tensor) -> memoryview:
    return memoryview(t.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def chunks(data: memoryview) -> Iterable[memoryview]:
    return (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


@dataclass
class Run:
    """One rank's model and the files of this run."""

    home: Path
    rank: int
    layers: int
    model: nn.Module

    def __post_init__(self) -> None:
        self.params: dict[str, Tensor] = dict(self.model.named_parameters())
        mesh = init_device_mesh("cpu", (TP,))
        self.dtensors: dict[str, Any] = {
            name: DTensor.from_local(p.detach(), mesh, [Shard(dim_of(name))]) for name, p in self.params.items()
        }
        self.kept: Any = None
        self.background = dist.new_group(backend="gloo")

    def prepare(self) -> None:
        """Everything that is loaded and rewritten. The model holds this rank's part of it afterwards."""
        whole, dcp_dir, ours = self.home / "whole.safetensors", self.home / "dcp", self.home / "c"
        if self.rank == 0:
            g = torch.Generator().manual_seed(0)
            state = {name: torch.randn(WIDTH, WIDTH, generator=g) for name in self.params}
            save_file(state, whole)
            torch.save(state, self.home / "whole.pt")
            dcp.save(state, checkpoint_id=dcp_dir, no_dist=True)
            rules = [ShardRule(name, dim_of(name)) for name in self.params]
            reshard(whole, ours, TP, rules=rules)
        dist.barrier()
        with safe_open(whole, "pt") as f:
            for name, p in self.params.items():
                p.data.copy_(f.get_tensor(name).chunk(TP, dim_of(name))[self.rank])

    def clear(self) -> None:
        """Nothing of the last turn is left, neither on the disk nor on its way there."""
        checkpoint.wait()
        if self.kept is not None and hasattr(self.kept, "result"):
            self.kept.result()
        self.kept = None
        gc.collect()
        for left in ("out", f"raw{self.rank}"):
            path = self.home / left
            if self.rank == 0 or left != "out":
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        dist.barrier()
        if self.rank == 0:
            os.sync()  # with `discard` the disk hears of what was deleted when the journal is written
        touch(self.layers * NBYTES // TP)
        dist.barrier()

    # -- load ---------------------------------------------------------------------------------------------
    def load_floor(self) -> None:
        """This rank's bytes alone: read where they follow each other, else copied from the mapped file."""
        path = self.home / "whole.safetensors"
        header = path.stat().st_size - self.layers * NBYTES
        with path.open("rb") as f:
            for i, (name, p) in enumerate(sorted(self.params.items())):  # the order of the file
                at = header + i * NBYTES
                if dim_of(name) == 0:
                    at += self.rank * NBYTES // TP
                    for chunk in chunks(memory(p)):
                        os.preadv(f.fileno(), [chunk], at)
                        at += len(chunk)
                else:
                    whole = np.memmap(path, np.float32, "r", at, (WIDTH, WIDTH))
                    width = WIDTH // TP
                    np.copyto(p.detach().numpy(), whole[:, self.rank * width : (self.rank + 1) * width])

    def load(self, name: str) -> Callable[[], object]:
        return lambda: checkpoint.load(self.home / name, self.model, sharded=False)

    def load_then_slice(self, mmap: bool) -> Callable[[], object]:
        def run() -> None:
            full = torch.load(self.home / "whole.pt", weights_only=True, map_location="cpu", mmap=mmap)
            for name, p in self.params.items():
                p.data.copy_(full[name].chunk(TP, dim_of(name))[self.rank])

        return run

    def get_slice(self) -> None:
        width = WIDTH // TP
        columns = slice(self.rank * width, (self.rank + 1) * width)
        with safe_open(self.home / "whole.safetensors", "pt") as f:
            for name, p in self.params.items():
                part = f.get_slice(name)
                p.data.copy_(part[columns] if dim_of(name) == 0 else part[:, columns])

    def dcp_load(self) -> None:
        dcp.load(self.dtensors, checkpoint_id=self.home / "dcp")

    # -- save ---------------------------------------------------------------------------------------------
    def write_floor(self) -> None:
        with (self.home / f"raw{self.rank}").open("wb", buffering=0) as f:
            for p in self.params.values():
                for chunk in chunks(memory(p)):
                    f.write(chunk)
            os.fsync(f.fileno())

    def save(self) -> None:
        checkpoint.save({"model": self.model.state_dict()}, self.home / "out")

    def dcp_save(self) -> None:
        dcp.save(self.dtensors, checkpoint_id=self.home / "out")

    # -- save in the background: until training goes on ----------------------------------------------------
    def copy_floor(self) -> None:
        self.kept = [p.detach().clone() for p in self.params.values()]

    def async_save(self) -> None:
        checkpoint.save({"model": self.model.state_dict()}, self.home / "out", background=True)

    def dcp_async_save(self) -> None:
        self.kept = dcp.async_save(self.dtensors, checkpoint_id=self.home / "out", process_group=self.background)

    # -- rewrite, on one rank --------------------------------------------------------------------------------
    def copy_files(self) -> None:
        (self.home / "out").mkdir()
        for i in range(TP):
            src = (self.home / f"c/tp_rank_{i}/model.safetensors").open("rb", buffering=0)
            with src, (self.home / f"out/{i}").open("wb", buffering=0) as dst:
                buffer = memoryview(bytearray(CHUNK))
                while size := src.readinto(buffer):
                    dst.write(buffer[:size])
                os.fsync(dst.fileno())

    def consolidate(self) -> None:
        consolidate(self.home / "c", self.home / "out")

    def reshard(self) -> None:
        reshard(self.home / "c", self.home / "out", 2 * TP)

    def dcp_to_torch(self) -> None:
        dcp_to_torch_save(self.home / "dcp", self.home / "out")

    def alone(self, run: Callable[[], object]) -> Callable[[], object]:
        return run if self.rank == 0 else lambda: None


def check(run: Run, loads: list[Contestant]) -> None:
    """Every way to load gives the values that are there."""
    want = {name: p.detach().clone() for name, p in run.params.items()}
    for contestant in loads:
        for p in run.params.values():
            p.data.zero_()
        contestant.run()
        for name, p in run.params.items():
            check_equal(contestant.name, name, p, want[name], 0.0)


def report(result: Race, contestants: list[Contestant], what: str) -> None:
    say(table(result, contestants[0].name))
    say(f"\n| | memory added at the peak, {what} |\n|---|---:|")
    for contestant in contestants:
        peak = torch.tensor([peak_bytes(contestant) or 0])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        say(f"| {contestant.name} | {int(peak) / 1e6:.0f} MB |")
    say()


def main_of_rank(rank: int, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    tpcore.init(backend="cpu_gloo", tp=TP)
    say(conditions() + "\n")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="tpcore-bench-") as name:
        names = [name]
        dist.broadcast_object_list(names)
        run = Run(Path(names[0]), rank, options.layers, build(options.layers))
        if {"load", "rewrite"} & set(options.races):
            run.prepare()
        size = f"{options.layers * NBYTES / 1e9:.1f} GB"

        def entry(title: str, fn: Callable[[], object]) -> Contestant:
            return Contestant(title, fn, run.clear)

        loads = [
            entry("floor", run.load_floor),
            entry("tpcore, .safetensors", run.load("whole.safetensors")),
            entry("tpcore, .pt", run.load("whole.pt")),
            entry("safetensors get_slice", run.get_slice),
            entry("torch.load mapped, then slice", run.load_then_slice(mmap=True)),
            entry("torch.load, then slice", run.load_then_slice(mmap=False)),
            entry("torch.distributed.checkpoint", run.dcp_load),
        ]
        saves = [
            entry("floor: write and fsync", run.write_floor),
            entry("tpcore", run.save),
            entry("torch.distributed.checkpoint", run.dcp_save),
        ]
        copies = [
            entry("floor: copy to host memory", run.copy_floor),
            entry("tpcore", run.async_save),
            entry("torch.distributed.checkpoint", run.dcp_async_save),
        ]
        rewrites = [
            entry("floor: copy and fsync", run.alone(run.copy_files)),
            entry("tpcore, consolidate", run.alone(run.consolidate)),
            entry("tpcore, reshard to 4", run.alone(run.reshard)),
            entry("torch's dcp_to_torch_save", run.alone(run.dcp_to_torch)),
        ]
        if "load" in options.races:
            check(run, loads)
        races = {
            "load": (f"load {size} unsharded into the shards of tp={TP}", loads),
            "save": (f"save {size}, each rank its shards", saves),
            "async": (f"save {size} in the background, until training goes on", copies),
            "rewrite": (f"{size} of tp={TP}, offline", rewrites),
        }
        for key in options.races:
            title, contestants = races[key]
            report(race(title, contestants, options.rounds, 1, 1), contestants, "of the slower rank")
        run.clear()
    tpcore.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="of 64 MB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="on the file system to measure")
    parser.add_argument("--races", nargs="+", default=["load", "save", "async", "rewrite"])
    start(main_of_rank, parser.parse_args())


if __name__ == "__main__":
    main()
