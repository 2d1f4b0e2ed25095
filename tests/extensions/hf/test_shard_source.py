"""An engine at another degree receives its shards of a model's files from the ranks that have their parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers import hf
from helpers.counting import counted
from helpers.tiers import tiers
from test_weight_source import ADAPTERS, CASES, assert_same, made
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.errors import CheckpointError
from tpcore.layout import Block, Layout, ShardSpec
from tpcore.testing import run_ranks
from tpcore_hf import ShardSource, WeightSource
from tpcore_hf.load.source import TensorInfo

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
Pieces = list[tuple[Any, Tensor]]


def shards_of(engine: Mesh, told: list[TensorInfo]) -> dict[str, Layout]:
    """As an engine cuts: tables, heads and hidden entries by rows, projections back by columns; key heads of eight
    entries, each on several ranks where there are more of these."""
    layouts, tp = {}, engine.axes["tp"]
    for name, _, shape in told:
        if len(shape) == 2 and "gate.weight" not in name:
            back = any(key in name for key in ("o_proj", "down_proj", "w2", ".wo."))
            keys = ("k_proj" in name or "v_proj" in name) and tp % (shape[0] // 8) == 0
            blocks = (Block(shape[0], 8, replicate=True),) if keys else (Block(shape[int(back)]),)
            layouts[name] = Layout.of(ShardSpec(shape, int(back), blocks), "tp")
    return layouts


def fill(shards: Mapping[str, Tensor], piece: Any, values: Tensor, seen: Mapping[str, Tensor]) -> None:
    box = tuple(slice(at, at + n) for at, n in zip(piece.start, piece.size, strict=True))
    assert not seen[piece.name][box].any(), f"{piece} comes twice"
    seen[piece.name][box] = True
    shards[piece.name][box] = values


def assert_each_has_its_own(
    engine: Mesh, sent: list[Pieces], files: Mapping[str, Tensor], layouts: Any, atol: float = 0
) -> None:
    for rank in range(engine.size):
        of = {name: layouts.get(name, Layout(tuple(t.shape))) for name, t in files.items()}
        want = {name: layout.shard(files[name], rank, engine) for name, layout in of.items()}
        got, seen = {n: torch.zeros_like(t) for n, t in want.items()}, {n: torch.zeros_like(t) for n, t in want.items()}
        for piece, values in [pair for pieces in sent for pair in pieces if pair[0].target == rank]:
            assert (piece.dtype, piece.size) == (values.dtype, tuple(values.shape))
            fill(got, piece, values, seen)
        assert_same(got, want)
        for name, layout in of.items():  # all but padding came
            boxes = layout.boxes(rank, engine)
            assert seen[name].count_nonzero() == sum(torch.Size(box.size).numel() for box in boxes)


def sending(make: Callable[[], Any], options: dict[str, Any], engine: Mesh, dtype: Any) -> Callable[[Any], Any]:
    def rank(ctx: tpcore.ParallelContext) -> tuple[dict[str, Tensor], Any, Pieces]:
        model = tpcore.parallelize(make(), **options)
        whole = WeightSource(model, dtype=dtype)
        layouts = shards_of(engine, whole.metadata())
        source = ShardSource(model, engine, layouts, dtype=dtype)
        sent = list(source)
        assert [piece for piece, _ in sent] == [piece for piece in source.pieces if piece.source == ctx.rank]
        return dict(whole), layouts, sent

    return rank


@pytest.mark.parametrize(
    "case", tiers(["padded and tied", "stages", "experts over ranks"], slow=["key heads in halves", "fused"])
)
@pytest.mark.parametrize("tp", [1, 3, 4])
def test_shards_of_another_degree_are_those_of_the_files(case: str, tp: int) -> None:
    make, mesh, options = CASES[case]
    engine = Mesh({"dp": 2, "tp": tp}) if tp == 3 else Mesh({"tp": tp})
    results = run_ranks(Mesh(mesh), sending(partial(made, make), options, engine, torch.bfloat16))
    files, layouts, _ = results[0]
    assert_each_has_its_own(engine, [sent for _, _, sent in results], files, layouts)


def test_adapters_are_merged_into_the_shards() -> None:
    def adapted() -> Any:
        model = made(partial(hf.double, hf.llama))
        return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **ADAPTERS["linear"]))

    def make() -> Any:
        torch.manual_seed(1)
        return adapted()

    engine = Mesh({"tp": 4})
    results = run_ranks(Mesh({"tp": 2}), sending(make, {}, engine, None))
    files, layouts, _ = results[0]
    assert_each_has_its_own(engine, [sent for _, _, sent in results], files, layouts)


def test_nothing_is_gathered_and_each_byte_goes_once() -> None:
    """No collective at all; an engine of copies apart, the bytes are those of the files."""
    engine = Mesh({"tp": 4})

    def rank(_: tpcore.ParallelContext) -> tuple[int, int]:
        model = tpcore.parallelize(made(hf.llama))
        told = WeightSource(model).metadata()
        layouts = {name: Layout.of(ShardSpec(shape, 0), "tp") for name, _, shape in told}
        total = sum(dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in told)
        return total, sum(piece.nbytes for piece, _ in ShardSource(model, engine, layouts))

    results, calls = counted(Mesh({"tp": 2}), rank)
    assert sum(sent for _, sent in results) == results[0][0]
    plain = counted(Mesh({"tp": 2}), lambda _: tpcore.parallelize(made(hf.llama)) and None)[1]
    assert calls == plain


RECEIVER = """
import json, sys
from multiprocessing.connection import Listener
import numpy as np

with Listener(("127.0.0.1", 0), authkey=b"-") as listener:
    print(listener.address[1], flush=True)
    shapes, senders = json.loads(sys.stdin.readline())
    shards, total = {name: np.zeros(shape, np.uint16) for name, shape in shapes.items()}, 0
    connections = [listener.accept() for _ in range(senders)]
    while connections:
        for connection in list(connections):
            try:
                name, start, size = connection.recv()
            except EOFError:
                connections.remove(connection)
                continue
            data = connection.recv_bytes()
            total += len(data)
            box = tuple(slice(a, a + n) for a, n in zip(start, size))
            shards[name][box] = np.frombuffer(data, np.uint16).reshape(size)
np.savez(sys.argv[1], **shards)
print(total)
"""


def test_engines_in_processes_of_their_own_have_their_shards_bit_for_bit(tmp_path: Path) -> None:
    """They know numpy alone. tp=2 sends to tp=3: the bytes are those of the shards, without their padding."""
    engine = Mesh({"tp": 3})
    outs = [tmp_path / f"{rank}.npz" for rank in range(3)]
    command = [sys.executable, "-c", RECEIVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    receivers: Any = [subprocess.Popen([*command, out], text=True, **pipes) for out in outs]
    ports = [int(receiver.stdout.readline()) for receiver in receivers]

    def rank(ctx: tpcore.ParallelContext) -> tuple[dict[str, Tensor], Any, list[int]]:
        model = tpcore.parallelize(made(hf.mixtral))
        whole = WeightSource(model, dtype=torch.bfloat16)
        layouts = shards_of(engine, whole.metadata())
        files = dict(whole)
        if ctx.rank == 0:
            for receiver in receivers:
                of = {name: layouts.get(name, Layout(tuple(t.shape))) for name, t in files.items()}
                receiver.stdin.write(
                    repr([{n: [*lay.local_shape(engine)] for n, lay in of.items()}, 2]).replace("'", '"') + "\n"
                )
                receiver.stdin.flush()
        source, sent = ShardSource(model, engine, layouts, dtype=torch.bfloat16), [0] * engine.size
        connections = [Client(("127.0.0.1", port), authkey=b"-") for port in ports]
        for piece, values in source:
            connections[piece.target].send((piece.name, piece.start, piece.size))
            connections[piece.target].send_bytes(values.view(torch.uint16).numpy().tobytes())
            sent[piece.target] += piece.nbytes
        for connection in connections:
            connection.close()
        return files, layouts, sent

    import numpy as np

    results = run_ranks(Mesh({"tp": 2}), rank)
    files, layouts, _ = results[0]
    for i, (receiver, out) in enumerate(zip(receivers, outs, strict=True)):
        received = int(receiver.communicate()[0])
        assert receiver.returncode == 0
        got = np.load(out)
        of = {name: layouts.get(name, Layout(tuple(t.shape))) for name, t in files.items()}
        for name, layout in of.items():
            assert np.array_equal(got[name], layout.shard(files[name], i, engine).view(torch.uint16).numpy()), name
        boxes = [box for layout in of.values() for box in layout.boxes(i, engine)]
        assert received == sum(sent[i] for _, _, sent in results) == 2 * sum(torch.Size(b.size).numel() for b in boxes)


def test_layers_of_ones_own_and_layouts_of_no_tensor() -> None:
    engine = Mesh({"tp": 4})

    def rank(_: tpcore.ParallelContext) -> tuple[Any, Pieces]:
        torch.manual_seed(0)
        model = nn.Sequential(tpcore.ColumnParallelLinear(6, 8), nn.BatchNorm1d(8))
        layouts = {"0.weight": Layout.of(ShardSpec((8, 6), 1), "tp")}
        with pytest.raises(ValueError, match="no such"):
            ShardSource(model, engine, {"9.weight": layouts["0.weight"]})
        with pytest.raises(ValueError, match=r"\(8, 6\)"):
            ShardSource(model, engine, {"0.weight": Layout.of(ShardSpec((6, 8), 1), "tp")})
        return layouts, list(ShardSource(model, engine, layouts))

    results = run_ranks(Mesh({"tp": 2}), rank)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).state_dict()
    assert_each_has_its_own(engine, [sent for _, sent in results], whole, results[0][0])


def test_what_is_computed_for_its_file_is_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpcore_hf.load import shards

    monkeypatch.setattr(shards, "stored_as", lambda model, tensors: {name: t + 1 for name, t in tensors.items()})

    def rank(_: tpcore.ParallelContext) -> None:
        with pytest.raises(CheckpointError, match="WeightSource gives it to all"):
            ShardSource(tpcore.parallelize(hf.llama()), Mesh({"tp": 1}), {})

    run_ranks(Mesh({"tp": 2}), rank)
