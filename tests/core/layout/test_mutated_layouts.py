"""A few laws, and cuts, mappings, norms and layers that are wrong in one place: each breaks a law."""

from __future__ import annotations

import itertools

import pytest
import test_layout
import test_ops
import test_shard
import torch
import torch.nn.functional as F
from helpers.mutants import Mutant, breaks
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
    for spec in SPECS:
        for n in (1, 2, 4, 8):
            test_shard.check(spec, n)
            for r, block in itertools.product(range(n), range(len(spec.blocks))):
                assert not spec.blocks[block].replicate or list(spec.pieces(r, n))[block].length


def layouts() -> None:
    """A dim that is sharded twice has chunks of chunks."""
    assert LAYOUTS[2].local_shape(MESHES[0]) == (3, 2)
    for layout, mesh in itertools.product(LAYOUTS, MESHES):
        test_layout.check_boxes(layout, mesh)
        layout.shares(mesh)  # each has some: check_shares would take an error
        test_layout.check_shares(layout, mesh)
        for other in MESHES:
            test_layout.check_parts(layout, mesh, other)
        for r in range(mesh.size) if layout.axes == ("tp",) else ():
            full = test_layout.full_of(layout)
            part = layout.spec.shard(full, mesh.coords(r)["tp"], mesh.axes["tp"])
            assert torch.equal(layout.shard(full, r, mesh), part)


def transposes() -> None:
    for name in test_ops.MAPPINGS:
        test_ops.test_backward_is_the_transpose_and_its_own_backward_forward(name=name, tp=2)
    test_ops.test_a_shift_goes_to_the_rank_that_is_the_step_further()


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
    Mutant(_boxes, "cut.rank(mesh, coords)", "0"),
    Mutant(_local_shape, "shape[dim] = spec", "shape[0] = spec"),
    Mutant(_shares, "local += length", "local += 1"),
    Mutant(_shares, "len(along[dim]) == 1", "len(along[dim]) == 0"),
    Mutant(_once, "(box.full, box.size)", "(box.size,)"),
    Mutant(ops.copy, "partial(_all_reduce, comm=comm, dtype=dtype)", "_same"),
    Mutant(ops.reduce, ", _same)", ", partial(_all_reduce, comm=comm, dtype=dtype))"),
    Mutant(ops.all_gather, ", back)", ", partial(comm.split, dim=dim))"),
    Mutant(ops.reduce_scatter, "partial(comm.all_gather, dim=dim)", "partial(comm.all_gather, dim=1)"),
    Mutant(ops.shift, "(i + step)", "(i - step)"),
    Mutant(ops.shift, "(i + step)", "(i + abs(step))"),
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
    assert breaks(mutant, LAWS)
