"""Cuts, mappings and norms that are wrong in one place: a law of another test, on a few examples, finds each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import test_clip
import test_layout
import test_ops
import test_shard
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mutants import Mutant, breaks

from tpcore import Mesh
from tpcore.comm import mappings as ops
from tpcore.layout.layout import AxisCut, Layout, _boxes, _local_shape, _once, _shares, _steps, _within
from tpcore.layout.shard import Block, ShardSpec, _gathered_index, _source_index
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
DEGREES = (1, 2, 4, 8)


def of(test: Any, *examples: Sequence[Any]) -> Callable[[], None]:
    """The law of ``test`` on all combinations of these examples, in place of random ones."""

    @settings(phases=[Phase.generate], database=None)
    @given(st.sampled_from(list(product(*examples))))
    def law(chosen: tuple[Any, ...]) -> None:
        test.hypothesis.inner_test(*chosen)

    return law


LAWS = (
    of(test_shard.test_law, SPECS, DEGREES),
    of(test_shard.test_layout_tables_say_the_same_as_sharding, SPECS, DEGREES),
    of(test_shard.test_copies_counts_how_many_ranks_hold_an_entry, SPECS, DEGREES),
    of(test_layout.test_one_cut_is_its_spec, SPECS, DEGREES),
    of(test_layout.test_parts_give_the_full_tensor_and_every_other_mesh, LAYOUTS, MESHES, MESHES),
    of(test_layout.test_parts_tile_the_full_tensor, LAYOUTS, MESHES),
    of(test_layout.test_shares_count_each_entry_once, LAYOUTS, MESHES),
    *(
        partial(test_ops.test_backward_is_the_transpose_and_its_own_backward_forward, name=name, tp=2)
        for name in test_ops.MAPPINGS
    ),
    partial(test_clip.test_clips_as_torch_does_on_the_unsharded_model, 2, 2, "module"),
)
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
    assert breaks(mutant, LAWS)
