"""Checkpoints of a 2 GB model at tp=2 against raw reads, writes and copies, and against torch's own ways.

Every contestant runs in a process of its own, one at a time, in turns. What counts is its time over the floor
of the same round, and how far its memory rises above what it began with: the parameters are there already.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import tpcore
from tpcore import checkpoint
from tpcore.backend import Backend
from tpcore.checkpoint import rewriting
from tpcore.checkpoint.source import CutRule
from tpcore.comm import Comm, Op
from tpcore.context import ParallelContext, use
from tpcore.mesh import Group, Mesh

WIDTH, CHUNK, TP = 4096, 8 << 20, 2


class Alone(Comm):
    """Rank 0 of two, timed without its peer: a collective takes the peer to hold the same."""

    @property
    def process_group(self) -> None:
        return None

    def _all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x] * self.size, dim)

    def _all_reduce(self, x: torch.Tensor, op: Op, donate: bool) -> torch.Tensor:
        return x.clone()

    def _reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(self.size, dim)[0]


class AloneBackend(Backend):
    def start(self, timeout: float) -> tuple[int, int]:
        return 0, TP  # a rank whose peer is not there

    def comm(self, group: Group, rank: int) -> Comm:
        return Alone(group, torch.tensor([rank]))

    def device(self) -> torch.device:
        return torch.device("cpu")


def build(layers: int, device: str = "cpu") -> nn.Module:
    """Half of the layers are cut along rows, half along columns: 64 MB each, whole."""
    return nn.ModuleList(
        tpcore.ColumnParallelLinear(WIDTH, WIDTH, bias=False, gather_output=False, device=device)
        if i % 2
        else tpcore.RowParallelLinear(WIDTH, WIDTH, bias=False, input_is_parallel=True, device=device)
        for i in range(layers)
    )


def _empty(layers: int) -> nn.Module:
    return build(layers, "meta").to_empty(device="cpu")


def _memory(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{line}:")[2].split()[0]) << 10


def timed(make: Callable[[], Callable[[], object]]) -> None:
    """Print seconds, and bytes that memory peaked above what was there."""
    run = make()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, began = _memory("VmRSS"), time.perf_counter()
    run()
    print(time.perf_counter() - began, _memory("VmHWM") - before)


def raw_read(home: Path, layers: int) -> Callable[[], object]:
    """This rank's bytes, each row's half or the first half, into parameters that are there and warm."""
    model = _touched(_empty(layers))
    fd = os.open(home / "whole.safetensors", os.O_RDONLY)

    def run() -> None:
        size = WIDTH * WIDTH * 4
        for i, p in enumerate(model.parameters()):
            data = memoryview(p.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            at = os.stat(home / "whole.safetensors").st_size - (layers - i) * size
            if i % 2:
                for j in range(0, len(data), CHUNK):
                    os.preadv(fd, [data[j : j + CHUNK]], at + j)
            else:
                run_bytes = WIDTH * 2
                for row in range(WIDTH):
                    os.preadv(fd, [data[row * run_bytes : (row + 1) * run_bytes]], at + row * WIDTH * 4)

    return run


def _touched(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data.zero_()
    return model


def tpcore_load(home: Path, layers: int) -> Callable[[], object]:
    model = _touched(_empty(layers))
    return lambda: checkpoint.load(home / "whole.safetensors", model, sharded=False)


def torch_load_then_slice(home: Path, layers: int) -> Callable[[], object]:
    model = _touched(_empty(layers))

    def run() -> None:
        full = torch.load(home / "whole.pt", weights_only=True, map_location="cpu")
        for i, (name, p) in enumerate(model.named_parameters()):
            p.data.copy_(full[name].chunk(TP, 0 if i % 2 else 1)[0])

    return run


def dcp_load(home: Path, layers: int) -> Callable[[], object]:
    """torch.distributed.checkpoint reads whole tensors here: it knows a cut from DTensors only."""
    import torch.distributed.checkpoint as dcp

    model = _touched(_empty(layers))

    def run() -> None:
        full = {name: torch.empty(WIDTH, WIDTH) for name, _ in model.named_parameters()}
        dcp.load(full, checkpoint_id=home / "dcp", no_dist=True)
        for i, (name, p) in enumerate(model.named_parameters()):
            p.data.copy_(full[name].chunk(TP, 0 if i % 2 else 1)[0])

    return run


def raw_write(home: Path, layers: int) -> Callable[[], object]:
    model = _touched(_empty(layers))

    def run() -> None:
        with open(home / "raw", "wb") as f:
            for p in model.parameters():
                data = memoryview(p.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                for i in range(0, len(data), CHUNK):
                    f.write(data[i : i + CHUNK])
            f.flush()
            os.fsync(f.fileno())
        os.unlink(home / "raw")

    return run


def tpcore_write(home: Path, layers: int) -> Callable[[], object]:
    """What one rank writes of a sharded save: tensors, checksums, syncs."""
    from tpcore.checkpoint.writing import Part, write_tensor_files

    model = _touched(_empty(layers))

    def run() -> None:
        part = Part({"model": model.state_dict()}, lambda t, where: None)
        (home / "save").mkdir()
        write_tensor_files(str(home / "save"), "tp_rank_0", "0" * 32, part.files)

    return run


def host_copy(home: Path, layers: int) -> Callable[[], object]:
    model = _touched(_empty(layers))
    return lambda: [p.detach().clone() for p in model.parameters()]


def async_stall(home: Path, layers: int) -> Callable[[], object]:
    """Until a save in the background lets training go on, at tp=1."""
    from tpcore.checkpoint.writing import Part

    model = _touched(_empty(layers))
    return lambda: Part({"model": model.state_dict()}, lambda t, where: None).to_host()


def raw_copy(home: Path, layers: int) -> Callable[[], object]:
    def run() -> None:
        for rank in range(TP):
            with (
                open(home / f"c/tp_rank_{rank}/model.safetensors", "rb") as src,
                open(home / "o", "ab") as dst,
            ):
                while chunk := src.read(CHUNK):
                    dst.write(chunk)
                dst.flush()
                os.fsync(dst.fileno())
        os.unlink(home / "o")

    return run


def consolidate(home: Path, layers: int) -> Callable[[], object]:
    return lambda: rewriting.consolidate(home / "c", home / "out")


def reshard(home: Path, layers: int) -> Callable[[], object]:
    return lambda: rewriting.reshard(home / "c", home / "out", 4)


RACES = {
    "load": (raw_read, tpcore_load, torch_load_then_slice, dcp_load),
    "save": (raw_write, tpcore_write),
    "async": (host_copy, async_stall),
    "rewrite": (raw_copy, consolidate, reshard),
}


def prepare(home: Path, layers: int) -> None:
    import torch.distributed.checkpoint as dcp

    whole = {f"{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(layers)}
    save_file(whole, home / "whole.safetensors")
    rewriting.reshard(
        home / "whole.safetensors",
        home / "c",
        TP,
        rules=[CutRule(f"{i}.weight", 0 if i % 2 else 1) for i in range(layers)],
    )
    torch.save(whole, home / "whole.pt")
    dcp.save(whole, checkpoint_id=home / "dcp", no_dist=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of 64 MB each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="on the file system to measure")
    parser.add_argument("--one", nargs=2, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        warnings.simplefilter("ignore")
        contestant = next(c for race in RACES.values() for c in race if c.__name__ == given.one[0])
        with use(ParallelContext(AloneBackend(), Mesh({"tp": TP}), 0)):
            timed(lambda: contestant(Path(given.one[1]), given.layers))
        return
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f} before")
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="wt-ckpt-") as name:
        home = Path(name)
        prepare(home, given.layers)
        for title, contestants in RACES.items():
            ratios: dict[str, list[float]] = {}
            memory: dict[str, int] = {}
            seconds: dict[str, list[float]] = {}
            for _ in range(given.rounds):
                floor = 0.0
                for contestant in contestants:
                    own = contestant.__name__
                    words = [sys.executable, "-m", "benchmarks.checkpoint", "--one", own, name]
                    words += ["--layers", str(given.layers)]
                    said = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
                    floor = floor or float(said[0])
                    ratios.setdefault(own, []).append(float(said[0]) / floor)
                    seconds.setdefault(own, []).append(float(said[0]))
                    memory[own] = max(memory.get(own, 0), int(said[1]))
                    for left in ("out", "save"):
                        shutil.rmtree(home / left, ignore_errors=True)
            for own, values in ratios.items():
                time_, peaked = statistics.median(seconds[own]), memory[own] / 1e6
                print(f"{title:8} {own:22} {time_:7.2f} s {statistics.median(values):6.2f}x {peaked:8.0f} MB")


if __name__ == "__main__":
    main()
