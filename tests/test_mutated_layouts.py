"""A few laws, and cuts, mappings, norms and layers that are wrong in one place: each breaks a law."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from mutants import Mutant, alive
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.comm import mappings as ops
from tpcore.layout.layout import AxisCut, Layout, _boxes, _local_shape, _once, _shares, _steps, _within
from tpcore.layout.shard import Block, ShardSpec, _gathered_index, _source_index
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore.train import clip

SPECS = [
    ShardSpec((8, 3), 0),
    ShardSpec((3, 10), 1),  # padded
    ShardSpec.strided((12, 2), 0, 3),
    ShardSpec((16,), 0, (Block(8, 2), Block(4, 2, True), Block(4, 2, True))),  # 4 heads, 2 of keys
]
MESHES = [Mesh({"pp": 2, "tp": 2}), Mesh({"pp": 1, "tp": 4}), Mesh({"pp": 1, "tp": 1})]
LAYOUTS = [
    Layout.of(ShardSpec((12, 2), 0), "pp", "tp"),
    Layout((6, 8), (AxisCut(("pp",), ShardSpec((6, 8), 0)), AxisCut(("tp",), ShardSpec((6, 8), 1)))),
    Layout((10, 2), (AxisCut(("pp",), ShardSpec((10, 2), 0)), AxisCut(("tp",), ShardSpec((10, 2), 0)))),
    Layout.of(SPECS[2], "tp"),
    Layout.of(SPECS[3], "tp"),
]


def resharding() -> None:
    """``unshard . shard = id``, and from n to m is as to m at once."""
    for spec in SPECS:
        full = torch.arange(1, math.prod(spec.shape) + 1).view(spec.shape)
        for n in (1, 2, 4, 8):
            shards = [spec.shard(full, r, n) for r in range(n)]
            assert all(tuple(s.shape) == spec.local_shape(n) for s in shards)
            assert torch.equal(spec.unshard(shards), full)
            for r, block in itertools.product(range(n), range(len(spec.blocks))):
                assert not spec.blocks[block].replicate or list(spec.pieces(r, n))[block].length
            for s, index in zip(shards, spec.source_index(n), strict=True):
                assert not s.movedim(spec.dim or 0, 0)[index < 0].any()
            every = torch.cat(shards, spec.dim or 0).index_select(spec.dim or 0, spec.gathered_index(n))
            assert torch.equal(every, full)


def layouts() -> None:
    """The same over several axes; each entry counts once; a dim cut twice has chunks of chunks."""
    assert LAYOUTS[2].local_shape(MESHES[0]) == (3, 2)
    for layout in LAYOUTS:
        full = torch.arange(1.0, math.prod(layout.shape) + 1).view(layout.shape)
        for mesh in MESHES:
            parts = [layout.shard(full, r, mesh) for r in range(mesh.size)]
            assert torch.equal(layout.unshard(parts, mesh), full)
            counted = sum(
                float(parts[r][tuple(slice(a, a + b) for a, b in zip(s.start, s.size, strict=True))].sum()) / s.copies
                for r in range(mesh.size)
                for s in layout.shares(mesh)
            )
            alike = mesh.size // math.prod(mesh.axes[axis] for axis in layout.axes_on(mesh))
            boxes = [box for r in range(mesh.size) for box in layout.boxes(r, mesh)]
            assert sum(math.prod(b.size) / b.copies for b in boxes) / alike == full.numel()
            for r in range(mesh.size) if layout.axes == ("tp",) else ():
                part = layout.spec.shard(full, mesh.coords(r)["tp"], mesh.axes["tp"])
                assert torch.equal(parts[r], part)
            assert counted / alike == pytest.approx(float(full.sum()))
            for other in MESHES:
                for r in range(other.size):
                    assert torch.equal(layout.reshard(parts, mesh, r, other), layout.shard(full, r, other))


def transposes() -> None:
    """``<f(x), y> = <x, f_T(y)>``, summed over the ranks; replicated values count once."""

    def rank(ctx: ParallelContext) -> None:
        tp = ctx.comm("tp")
        torch.manual_seed(ctx.rank)
        x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
        for f in (
            lambda t: ops.all_gather(t, tp, 1),
            lambda t: ops.all_to_all(t, tp, 0, 1),
            lambda t: ops.reduce_scatter(t, tp, 0),
            lambda t: ops.shift(t, tp),
        ):
            given = x.clone().requires_grad_()
            out = f(given)
            other = y.flatten()[: out.numel()].view(out.shape)
            (grad,) = torch.autograd.grad(out, given, other)
            sums = torch.stack([(out * other).sum(), (given * grad).sum()]).detach()
            left, right = tp.all_reduce(sums).tolist()
            assert left == pytest.approx(right)
        same = torch.arange(16, dtype=torch.float64).view(4, 4)
        for f, start, other in ((ops.copy, same, x), (ops.reduce, x, same)):
            given = start.clone().requires_grad_()
            out = f(given, tp)
            (grad,) = torch.autograd.grad(out, given, other)
            into, back = (out * other).sum().detach(), (given * grad).sum().detach()
            left = tp.all_reduce(into) if f is ops.copy else into
            right = tp.all_reduce(back) if f is ops.reduce else back
            assert float(left) == pytest.approx(float(right))
        assert torch.equal(ops.shift(torch.full((1,), ctx.rank), tp), torch.full((1,), 1 - ctx.rank))

    run_ranks(Mesh({"tp": 2}), rank)


class Block2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def training() -> None:
    """Loss, gradients and norm of the plain module, fused projections and all."""
    torch.manual_seed(0)
    dense, x = Block2().double(), torch.randn(3, 6, dtype=torch.float64)
    dense(x).square().sum().backward()
    want = nn.utils.clip_grad_norm_(dense.parameters(), 1.0)

    def rank(ctx: ParallelContext) -> None:
        torch.manual_seed(0)
        cut = Block2().double()
        cut.up = tpcore.ColumnParallelLinear.from_plain(cut.up, gather_output=False, blocks=2)
        cut.down = tpcore.RowParallelLinear.from_plain(cut.down, input_is_parallel=True)
        y = cut(x)
        torch.testing.assert_close(y, dense(x))
        y.square().sum().backward()
        torch.testing.assert_close(tpcore.clip_grad_norm(cut.parameters(), 1.0), want)
        specs = tpcore.layers.shard_specs(cut)
        for name, p in dense.named_parameters():
            part = specs[name].shard(p.grad, ctx.rank, 2)
            torch.testing.assert_close(cut.get_parameter(name).grad, part)

    run_ranks(Mesh({"tp": 2}), rank)


LAWS = (resharding, layouts, transposes, training)
MUTANTS = [
    Mutant(ShardSpec._chunk, "return block.unit, n // units", "return block.unit, units"),
    Mutant(ShardSpec._chunk, "return -(-units // n)", "return (units // n)"),
    Mutant(ShardSpec.pieces, "rank // copies * length", "rank * length"),
    Mutant(ShardSpec.pieces, "local += length", "local += block.size"),
    Mutant(ShardSpec.pieces, "full + start, local,", "start, local,"),
    Mutant(ShardSpec.unshard, "piece.full, piece.length", "piece.local, piece.length"),
    Mutant(ShardSpec.shard, "piece.local, piece.length", "piece.full, piece.length"),
    Mutant(ShardSpec.shard, "new_zeros", "new_ones"),
    Mutant(AxisCut.rank, "rank * mesh.axes.get(axis, 1) + at", "at"),
    Mutant(_gathered_index, "rank * width", "width"),
    Mutant(_source_index, "p.full + p.length)", "p.full + p.length)[::-1]"),
    Mutant(_within, "run.full + lo - run.local", "run.full"),
    Mutant(_within, "run.copies * copies", "copies + run.copies"),
    Mutant(_steps, "ShardSpec((extents[dim],), 0)", "ShardSpec((layout.shape[dim],), 0)"),
    Mutant(_steps, ", 0, cut.spec.blocks)", ", 0)"),
    Mutant(_boxes, "cut.rank(mesh, at)", "0"),
    Mutant(_local_shape, "shape[dim] = spec", "shape[0] = spec"),
    Mutant(_shares, "local += length", "local += 1"),
    Mutant(_once, "(box.full, box.size)", "(box.size,)"),
    Mutant(ops.copy, "partial(_all_reduce, comm=comm, dtype=dtype)", "_same"),
    Mutant(ops.reduce, ", _same)", ", partial(_all_reduce, comm=comm, dtype=dtype))"),
    Mutant(ops.all_gather, ", back)", ", partial(comm.split, dim=dim))"),
    Mutant(ops.reduce_scatter, "partial(comm.all_gather, dim=dim)", "partial(comm.all_gather, dim=1)"),
    Mutant(ops.shift, "(i + step)", "(i - 2 * step)"),
    Mutant(clip._power_sum, "norm.pow(p) / copies", "norm / copies"),
    Mutant(clip.norm_of, "total + part", "part"),
    Mutant(clip._over, 'if p == float("inf") else "sum"', 'if p == 2.0 else "sum"'),
    Mutant(clip.scale_to, "grad.mul_(", "grad.div_("),
]


def test_the_laws_hold() -> None:
    for law in LAWS:
        law()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_each_mutant_breaks_a_law(mutant: Mutant) -> None:
    broken = []
    with alive(mutant):
        for law in LAWS:
            try:
                law()
            except Exception:  # noqa: BLE001  whatever it breaks in
                broken.append(law.__name__)
                break
    assert broken
