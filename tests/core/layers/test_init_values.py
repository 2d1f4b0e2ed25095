"""Initial values do not depend on how a layer is sharded, and making them needs little memory."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore.layers import initial
from tpcore.layers.initial import initial_part
from tpcore.layout.layout import Layout
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import Block, ShardSpec
from tpcore.runtime.context import ParallelContext

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FILLS: dict[str, Callable[[Tensor], object]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "scaled normal": lambda t: nn.init.normal_(t, mean=1.0, std=0.02),
    "truncated normal": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "constant": lambda t: nn.init.constant_(t, 0.25),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
    "kaiming normal": lambda t: nn.init.kaiming_normal_(t, nonlinearity="relu"),
    "plain tensor methods": lambda t: t.normal_().mul_(0.5).add_(1).clamp_(0.5, 1.5),
}
# these look at the tensor or fill parts of it, so that they get the real one
WHOLE: dict[str, Callable[[Tensor], object]] = {
    "orthogonal": nn.init.orthogonal_,
    "identity": nn.init.eye_,
    "sparse": lambda t: nn.init.sparse_(t, 0.5),
    "two draws": lambda t: t.normal_().add_(torch.randn(t.shape, dtype=t.dtype)),
    "drawn twice": lambda t: t.uniform_().normal_(),
    "one row cleared": lambda t: nn.init.normal_(t)[2].fill_(0),
    "data": lambda t: t.data.copy_(torch.arange(t.numel()).view(t.shape)),
}


SLABS = [1, 64, 1 << 22]


@pytest.fixture(params=SLABS)
def slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Slabs as small as may be, a few rows, and larger than the whole tensor."""
    monkeypatch.setattr(initial, "SLAB", request.param)
    return int(request.param)


def expected(fill: Callable[[Tensor], object], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    full = torch.empty(shape, dtype=dtype)
    with torch.no_grad():
        fill(full)
    return full, torch.rand(3)


SPECS = [
    ShardSpec((37, 12), 0),
    ShardSpec((37, 5), 0, (Block(16, 4), Block(12), Block(9, 3))),
    ShardSpec((12, 37), 1),
    ShardSpec((33, 7), 1, (Block(4), Block(3))),
    ShardSpec((35, 3)),
    ShardSpec((3, 34), 0),
]
SHAPES = [(7,), (16,), (100,), (1,), (0,), (), (5, 3, 7), (0, 4), (4, 0)]
OF_ANY_DIMS = [ShardSpec(shape, dim) for shape in SHAPES for dim in (None, *range(len(shape)))]


DRAWN = ("uniform", "normal", "truncated normal", "plain tensor methods", "two draws")
# the others scale what these draw, and torch draws each dtype in a way of its own
POINTS = [
    (name, dtype, slab)
    for name, dtype, slab in itertools.product([*FILLS, *WHOLE], DTYPES, SLABS)
    if name in DRAWN or dtype is torch.float32
]


@pytest.mark.parametrize(("name", "dtype", "slab"), POINTS, indirect=["slab"])
def test_a_shard_holds_its_part_of_the_unsharded_values(name: str, dtype: torch.dtype, slab: int) -> None:
    fill = (FILLS | WHOLE)[name]
    for spec in [*SPECS, *(OF_ANY_DIMS if name in ("uniform", "normal") else ())]:
        full, after = expected(fill, spec.shape, dtype)
        for n, rank in ((1, 0), (2, 0), (2, 1), (3, 1), (4, 3)):
            torch.manual_seed(11)
            shard = initial_part(fill, Layout.of(spec, "tp"), rank, Mesh({"tp": n}), dtype)
            assert torch.equal(shard, spec.shard(full, rank, n)), f"{spec} on rank {rank} of {n}"
            assert torch.equal(torch.rand(3), after), f"{spec}: the random stream goes on elsewhere"


def test_an_error_of_the_init_method_is_the_callers() -> None:
    def broken(t: Tensor) -> None:
        raise ArithmeticError("the user's own")

    with pytest.raises(ArithmeticError, match="the user's own"):
        initial_part(broken, Layout.of(ShardSpec((4, 4), 0), "tp"), 0, Mesh({"tp": 2}), torch.float32)


# -- layers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tp", [1, 2, 4])
@each_rank(tp="tp")
def test_what_is_drawn_after_a_layer_is_what_is_drawn_after_the_plain_one(ctx: ParallelContext, tp: int) -> None:
    """The matrix compares the values of each layer."""
    pairs: list[tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = [
        (tpcore.ColumnParallelLinear, nn.Linear),
        (tpcore.RowParallelLinear, nn.Linear),
        (tpcore.ParallelEmbedding, nn.Embedding),
    ]

    def after(make: Callable[..., nn.Module]) -> Tensor:
        torch.manual_seed(5)
        make(24, 36)
        return torch.rand(3)

    want = [after(plain) for _, plain in pairs]
    assert all(map(torch.equal, want, [after(ours) for ours, _ in pairs]))


# slabs of all sizes are tested above; a layer makes its parts by the same function
@pytest.mark.parametrize("slab", SLABS[1:2], indirect=True)
@pytest.mark.parametrize("name", FILLS)
@each_rank(dp=1, tp=2)
def test_layers_take_an_init_method_for_the_weight(ctx: ParallelContext, name: str, slab: int) -> None:
    for make, shape in (
        (lambda f: tpcore.ColumnParallelLinear(24, 36, init_method=f), (36, 24)),
        (lambda f: tpcore.RowParallelLinear(24, 36, init_method=f), (36, 24)),
        (lambda f: tpcore.ParallelEmbedding(24, 36, init_method=f), (24, 36)),
    ):
        full, _ = expected(FILLS[name], shape, torch.float32)
        torch.manual_seed(11)
        layer = make(FILLS[name])
        spec = layer.shard_specs["weight"]
        assert torch.equal(layer.weight, spec.shard(full, ctx.coord("tp"), 2))


@each_rank(tp=2)
def test_under_inference_mode_and_default_device_contexts(ctx: ParallelContext) -> None:
    torch.manual_seed(5)
    plain = nn.Linear(8, 12)
    torch.manual_seed(5)
    with torch.inference_mode(), torch.device("cpu"):
        layer = tpcore.ColumnParallelLinear(8, 12, gather_output=False)
    assert not layer.weight.is_inference()
    assert torch.equal(layer.weight, plain.weight.chunk(2)[ctx.coord("tp")])
    with torch.device("meta"):
        assert tpcore.ColumnParallelLinear(8, 12).weight.is_meta


# -- memory ------------------------------------------------------------------------------------------------

MEASURE = """
import os
import torch
import tpcore
from tpcore.layers import initial
from tpcore.runtime.context import ParallelContext, use
from tpcore.layout.mesh import Mesh
from tpcore.testing.threads import ThreadBackend, ThreadWorld

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

def reset():
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from what is resident now

torch.set_num_threads(1)
def measure(kind, rows):
    make = {
        "column": lambda size, width: tpcore.ColumnParallelLinear(width, size),
        "row": lambda size, width: tpcore.RowParallelLinear(size, width),
        "embedding": lambda size, width: tpcore.ParallelEmbedding(size, width, 0),
    }[kind]
    slab, initial.SLAB = initial.SLAB, 0
    make(64, 64)  # what torch loads on first use
    initial.SLAB = slab
    reset()
    before = peak()
    layer = make(rows, 8192)
    shard = sum(p.numel() * p.element_size() for p in layer.parameters())
    print(kind, rows, peak() - before, shard, flush=True)

for case in (("column", 8192), ("row", 4096), ("embedding", 4096)):
    if not os.fork():
        # one rank of eight, alone: making a layer needs no other rank
        with use(ParallelContext(ThreadBackend(5, ThreadWorld(8)), Mesh({"tp": 8}), 5)):
            measure(*case)
        os._exit(0)
    assert os.wait()[1] == 0, case
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak resident size from /proc")
def test_a_rank_never_holds_more_than_its_shard_and_one_slab() -> None:
    """8k x 8k in float32 is 256 MiB, a shard of eight 32 MiB and a slab 16 MiB."""
    out = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=200)
    lines = [line.split() for line in out.stdout.splitlines()]
    assert len(lines) == 3
    for kind, *numbers in lines:
        rows, grown, shard = map(int, numbers)
        assert shard == rows * 4096 + {"column": rows // 2, "row": 32768, "embedding": 0}[kind]
        # seen: shard + 15.9 MiB for all three; 1 MiB of room either way for what else the process touches
        room = 4 * initial.SLAB + 2**20
        assert -(2**20) <= grown - shard <= room, f"{kind} grew by {grown / 2**20:.1f} MiB"


@each_rank(tp=4)
def test_meta_allocates_and_draws_nothing(ctx: ParallelContext) -> None:
    state = torch.get_rng_state()
    for layer, shape in (
        (tpcore.ColumnParallelLinear(2**20, 2**20, device="meta"), (2**18, 2**20)),
        (tpcore.RowParallelLinear(2**20, 2**20, device="meta"), (2**20, 2**18)),
        (tpcore.ParallelEmbedding(2**20, 2**20, device="meta"), (2**18, 2**20)),
    ):
        assert layer.weight.is_meta
        assert tuple(layer.weight.shape) == shape
    assert torch.equal(torch.get_rng_state(), state)


# -- by a function for whole modules: each rank gets its part of what the function does to the whole ------------
def fill(module: nn.Module) -> None:
    """By the kind of module and by the sizes of the whole."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=1 / module.in_features)
        module.bias.data.uniform_(-0.1, 0.1)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_()
        module.weight.data[7] = 0.0


def made(embedding: Any, column: Any, row: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(embedding(12, 8), column(8, 12), nn.LayerNorm(12), row(12, 8))


@pytest.mark.parametrize("tp", [1, 2, 4])
@each_rank(tp="tp")
def test_values_are_those_of_apply_and_hooks_stay(ctx: tpcore.ParallelContext, tp: int) -> None:
    whole = made(nn.Embedding, nn.Linear, nn.Linear)
    mine: Any = made(tpcore.ParallelEmbedding, tpcore.ColumnParallelLinear, tpcore.RowParallelLinear)
    seen = list[tuple[int, ...]]()
    mine[1].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    torch.manual_seed(2)
    whole.apply(fill)
    after = torch.rand(3)
    torch.manual_seed(2)
    assert tpcore.init_weights(mine, fill) is mine
    assert torch.equal(torch.rand(3), after)
    for name, p in mine.named_parameters():
        layer, _, key = name.rpartition(".")
        part_of = getattr(mine.get_submodule(layer), "part_of", lambda key, p: p)
        assert torch.equal(p, part_of(key, whole.get_parameter(name))), name
    mine[1](torch.ones(1, 8))
    assert seen == [(1, 12)]


@each_rank(pp=2, tp=2)
def test_a_model_on_stages_is_refused(ctx: tpcore.ParallelContext) -> None:
    layers = [tpcore.ColumnParallelLinear(8, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"on one of pp=2 stages.*call model.apply\(fn\) on the whole"):
        tpcore.init_weights(tpcore.PipelinedLayers(layers, 2), fill)
