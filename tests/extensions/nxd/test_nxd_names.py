"""Scripts written for NeuronX Distributed: every documented path, signature and call form."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from helpers.rank_pool import RankPool
from helpers.worlds import each_rank
from torch import Tensor, nn
from torch.nn import init

import tpcore
import tpcore_nxd
from tpcore.comm import mappings as ops
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_nxd import parallel_layers as pl
from tpcore_nxd.modules import GQAQKVColumnParallelLinear
from tpcore_nxd.operators.argmax import argmax
from tpcore_nxd.operators.topk import topk
from tpcore_nxd.parallel_layers import mappings, parallel_state, utils


def _mesh(tp: int, dp: int = 1) -> Mesh:
    return Mesh({"pp": 1, "dp": dp, "tp": tp})


# -- paths --------------------------------------------------------------------------------------------
FORMS = """
    import sys
    import tpcore_nxd as neuronx_distributed

    assert "tpcore_nxd.parallel_layers" not in sys.modules, "loaded unasked"
    from_chain = neuronx_distributed.parallel_layers.layers.ColumnParallelLinear
    assert from_chain is neuronx_distributed.ColumnParallelLinear
    assert not neuronx_distributed.parallel_state.model_parallel_is_initialized()
    assert not neuronx_distributed.parallel_layers.parallel_state.model_parallel_is_initialized()

    import tpcore_nxd.parallel_state
    import tpcore_nxd.parallel_layers.parallel_state as ps
    import tpcore_nxd.parallel_layers.utils as neuronx_dist_utils
    from tpcore_nxd import parallel_layers, parallel_state
    from tpcore_nxd.parallel_layers import checkpointing, grads, layers, loss_functions, mappings
    from tpcore_nxd.parallel_layers import random, utils
    from tpcore_nxd.parallel_layers import parallel_state as ps2
    from tpcore_nxd.parallel_layers import PARALLEL_FUNCTIONS, PARALLEL_MODULES
    from tpcore_nxd.parallel_layers.pad import get_number_of_extra_heads, pad_model
    from tpcore_nxd.optimizer import NeuronEPZero1Optimizer
    from tpcore_nxd.operators.argmax import argmax
    from tpcore_nxd.operators.topk import topk
    from tpcore_nxd.pipeline.comm import rmsg
    assert tuple(map(int, neuronx_distributed.__version__.split("."))) >= (0, 1)
    assert ps is ps2

    # private names that scripts and optimum-neuron import; test_public_api.py asks for the others
    from tpcore_nxd.parallel_layers.mappings import (
        _gather_along_dim, _gather_along_first_dim, _reduce_scatter_along_dim, _split_along_first_dim,
    )
    from tpcore_nxd.parallel_layers.random import _MODEL_PARALLEL_RNG_TRACKER_NAME
"""


def test_every_import_form_in_a_fresh_process() -> None:
    code = "import warnings; warnings.simplefilter('error')\n" + textwrap.dedent(FORMS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_object_under_every_path() -> None:
    assert pl.parallel_cross_entropy is pl.loss_functions.parallel_cross_entropy is tpcore.parallel_cross_entropy
    assert pl.move_model_to_device is utils.move_model_to_device is tpcore.layers.move_model_to_device
    assert pl.initialize_model_parallel is tpcore_nxd.parallel_state.initialize_model_parallel
    assert pl.parallel_state.__all__ == tpcore_nxd.parallel_state.__all__
    for name in pl.parallel_state.__all__:
        assert getattr(pl.parallel_state, name) is getattr(tpcore_nxd.parallel_state, name)


# -- signatures ---------------------------------------------------------------------------------------
# in order and with defaults; None where the published signature has no default: the other spelling may be used instead
PUBLISHED = """
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        context_parallel_size=1, expert_model_parallel_size=1, skip_collective_init=False, lnc_size=1)
    ColumnParallelLinear(input_size, output_size, bias=True, gather_output=True, dtype=torch.float32, device=None)
    RowParallelLinear(input_size, output_size, bias=True, input_is_parallel=False, dtype=torch.float32, device=None)
    ParallelEmbedding(num_embeddings, embedding_dim, padding_idx=None)
    parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, ignore_index=-100)
    clip_grad_norm(parameters, max_norm, norm_type=2.0)
    move_model_to_device(model, device)
    save(state_dict=None, save_dir=None)
    load(load_dir=None, model=None, model_key='model', sharded=True)
    copy_to_tensor_model_parallel_region(input_, process_group=None)
    reduce_from_tensor_model_parallel_region(input_, process_group=None)
    scatter_to_tensor_model_parallel_region(input_, process_group=None)
    gather_from_tensor_model_parallel_region(input_, process_group=None)
    parallel_layers.mappings.scatter_to_sequence_parallel_region(input_, sequence_dimension=0, process_group=None)
    parallel_layers.mappings.gather_from_sequence_parallel_region(input_, sequence_dimension=0, to_model_parallel=True,
        process_group=None)
    parallel_layers.mappings.reduce_scatter_to_sequence_parallel_region(input_, sequence_dimension=0,
        process_group=None, dtype=None)
    model_parallel_xla_manual_seed(seed)
    parallel_layers.utils.divide(numerator, denominator)
    split_tensor_along_last_dim(tensor, num_partitions, contiguous_split_chunks=False)
    neuronx_distributed_config(tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1,
        context_parallel_size=1, pipeline_config=None, optimizer_config=None, activation_checkpoint_config=None,
        pad_model=False, sequence_parallel=False, model_init_config=None, lora_config=None,
        mixed_precision_config=None, sequential_move_factor=11, lnc_size=1)
    initialize_parallel_model(nxd_config, model_fn, include_buffers=False)
    initialize_parallel_optimizer(nxd_config, optimizer_class, parameters)
    save_checkpoint(checkpoint_dir_str, tag, model=None, optimizer=None, scheduler=None, user_content=None,
        num_workers=8, use_xser=False, num_kept_ckpts=None, async_save=False, zero1_optimizer=False)
    load_checkpoint(path, tag=None, model=None, optimizer=None, scheduler=None, num_workers=8, strict=True)
    modules.GQAQKVColumnParallelLinear(input_size, output_sizes, bias=True, gather_output=True, dtype=torch.float32,
        device=None, init_method=None, sequence_parallel_enabled=False, keep_master_weight=False,
        kv_size_multiplier=1, fuse_qkv=True, reduce_dtype=torch.float32)
"""
LINEAR = (
    "stride init_method sequence_parallel_enabled sequence_dimension skip_bias_add pad reduce_dtype "
    "tensor_model_parallel_group keep_master_weight"
)
EMBEDDING = (
    "max_norm norm_type scale_grad_by_freq sparse init_method device dtype shard_across_embedding pad "
    "sequence_parallel_enabled tensor_model_parallel_group sequence_dimension collect_output"
)


@pytest.mark.parametrize("signature", re.findall(r"\S+\([^)]*", PUBLISHED), ids=lambda text: text.partition("(")[0])
def test_published_order_and_defaults(signature: str) -> None:
    name, _, published = " ".join(signature.split()).partition("(")
    known = inspect.signature(resolve_name(f"tpcore_nxd.{name}")).parameters.values()
    parameters = [*known][: published.count(", ") + 1]
    told = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert ", ".join(told) == published
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_later_keywords_exist() -> None:
    for layer, later in (
        (pl.ColumnParallelLinear, LINEAR),
        (pl.RowParallelLinear, f"{LINEAR} reduce_output"),
        (pl.ParallelEmbedding, EMBEDDING),
    ):
        assert set(later.split()) <= set(inspect.signature(layer).parameters)


# -- the documented call forms ------------------------------------------------------------------------
@each_rank(dp=1, tp=2)
def test_documented_calls_of_linear_layers(ctx: ParallelContext) -> None:
    x = torch.randn(2, 3, 8)
    by_position = pl.ColumnParallelLinear(8, 12, True, True, torch.float32, None)
    assert by_position(x).shape == (2, 3, 12)
    by_keyword = pl.ColumnParallelLinear(
        input_size=8, output_size=12, bias=False, gather_output=False, dtype=torch.bfloat16, device="cpu"
    )
    assert by_keyword.weight.shape == (6, 8)
    assert by_keyword.weight.dtype is torch.bfloat16
    assert by_keyword.bias is None

    # the default device that the page of RowParallelLinear prints is False
    row = pl.RowParallelLinear(8, 12, True, False, torch.float32, False)
    assert row(x).shape == (2, 3, 12)
    row = pl.RowParallelLinear(
        input_size=8, output_size=12, bias=True, input_is_parallel=True, dtype=torch.float32, device=False
    )
    assert row.weight.device.type == "cpu"
    assert row(x[..., :4]).shape == (2, 3, 12)


@each_rank(dp=1, tp=2)
def test_documented_calls_of_embeddings(ctx: ParallelContext) -> None:
    ids = torch.arange(10)
    tables = []
    for make in (
        partial(nn.Embedding, 10, 4),
        partial(pl.ParallelEmbedding, 10, 4, init.normal_),
        partial(pl.ParallelEmbedding, 10, 4, init.normal_, torch.float32, None),
        partial(pl.ParallelEmbedding, 10, 4, init.normal_, torch.float32, device=False),
        partial(pl.ParallelEmbedding, num_embeddings=10, embedding_dim=4, init_method=init.normal_, device="cpu"),
        # the later order
        partial(pl.ParallelEmbedding, 10, 4, None, None, 2.0, False, False, init.normal_, None, torch.float32),
    ):
        torch.manual_seed(5)
        tables.append(make()(ids))
    for table in tables[1:]:
        assert torch.equal(table, tables[0])
    half = pl.ParallelEmbedding(10, 4, init.normal_, torch.float16, "cpu")
    assert half.weight.dtype is torch.float16


@each_rank(dp=1, tp=2)
def test_keywords_that_change_nothing(ctx: ParallelContext) -> None:
    for name, keywords, function, dim in CASES:
        x = torch.arange(128.0).view(4, 8, 4)
        y = getattr(mappings, name)(input_=x.clone(), **keywords)
        assert torch.equal(y, function(x, ctx.comm("tp"), dim)), name
    for given in (False, True):
        assert pl.ParallelEmbedding(8, 4, use_spmd_rank=given)(torch.arange(8)).shape == (8, 4)
    pl.ColumnParallelLinear(4, 8, pad_alignment_size_per_rank=4, keep_padded_output=True)  # there is no padding
    assert pl.ColumnParallelLinear(4, 7, pad=True, pad_alignment_size_per_rank=1)(torch.ones(4)).shape == (7,)
    for changed in ({"pad_alignment_size_per_rank": 4}, {"keep_padded_output": True}):
        with pytest.raises(ValueError, match="leave these two out, or give output_size rounded up"):
            pl.ColumnParallelLinear(4, 7, pad=True, **changed)


@each_rank(dp=1, tp=2)
def test_operators_of_a_whole_tensor(ctx: ParallelContext) -> None:
    """As torch's on the whole, where the first of equal values counts, along a sharded dim and along another."""
    for whole in (torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.ones(3, 8)):
        part = whole.chunk(2, -1)[ctx.coord("tp")]
        for keepdim in (False, True):
            assert torch.equal(argmax(part, 1, -1, keepdim), whole.argmax(1, keepdim))
            assert torch.equal(argmax(part, 0, 1, keepdim), whole.argmax(0, keepdim))
    whole = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    part = whole.chunk(2, -1)[ctx.coord("tp")]
    for k, dim in ((2, 1), (6, -1), (3, 0)):
        for got, want in zip(topk(part, k, dim, -1), whole.topk(k, dim), strict=True):
            assert torch.equal(got, want)


@each_rank(dp=1, tp=2)
def test_master_weights_of_projections(ctx: ParallelContext) -> None:
    for fuse, names in ((True, ["qkv"]), (False, ["q", "k", "v"])):
        torch.manual_seed(3)
        layer = GQAQKVColumnParallelLinear(
            4, [8, 4], keep_master_weight=True, fuse_qkv=fuse, dtype=torch.float64, kv_size_multiplier=2
        )
        torch.manual_seed(3)
        plain = GQAQKVColumnParallelLinear(4, [8, 4], fuse_qkv=fuse, dtype=torch.float64, kv_size_multiplier=2)
        for name in names:
            weight, full = getattr(layer, f"weight_{name}"), getattr(layer, f"master_weight_{name}")
            assert torch.equal(weight, getattr(plain, f"weight_{name}"))
            assert torch.equal(weight, layer.shard_specs[f"weight_{name}"].shard(full, ctx.coord("tp"), 2))
        assert not any("master" in name for name in layer.state_dict())


@each_rank(dp=1, tp=2)
def test_documented_calls_of_save_and_load(ctx: ParallelContext, tmp_path: Path) -> None:
    by_keyword, later_names, by_position = (str(tmp_path / name) for name in "abc")
    torch.manual_seed(1)
    model = pl.ColumnParallelLinear(4, 6)
    state = {"model": model.state_dict(), "step": 3}
    pl.save(state_dict=state, save_dir=by_keyword)
    pl.save(checkpoint=state, output_dir=later_names)
    pl.save(state, by_position, save_xser=True)
    for load in (
        partial(pl.load, load_dir=by_keyword, model_key="model", sharded=True),
        partial(pl.load, chkpt_path=later_names),
        lambda model: pl.load(by_position, model, "model", True),
    ):
        other = pl.ColumnParallelLinear(4, 6)
        rest = load(model=other)
        assert rest["step"] == 3
        assert torch.equal(other.weight, model.weight)
        assert torch.equal(other.bias, model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for later in ((None, optimizer), (model, None, "model")):  # they had been read as model_key and sharded
        with pytest.raises(TypeError, match="model_or_optimizer= and others by name"):
            pl.load(by_keyword, *later)
    for directory in (by_keyword, later_names, by_position):
        assert {"tp_rank_0", "tp_rank_1"} <= set(os.listdir(directory))


@each_rank(tp=1)
def test_arguments_that_would_be_ignored(ctx: ParallelContext, tmp_path: Path) -> None:
    for bad in ({"keep_last": 0}, {"async_save": True, "save_serially": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            pl.save({}, tmp_path / "c", **bad)
    for bad in ({"master_dp_only": False}, {"weights_only": False}, {"sharded": False}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            pl.load(tmp_path / "c", **bad)
    with pytest.raises(TypeError, match="both"):
        pl.save({}, tmp_path / "c", output_dir=tmp_path / "c")
    with pytest.raises(TypeError, match="neither"):
        pl.load()
    assert os.listdir(tmp_path) == []


@each_rank(dp=2, tp=1)
def test_options_of_save_mean_what_they_mean_in_nxd(ctx: ParallelContext, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3), "v": torch.ones(4)}}
    for options, files in (({}, 1), ({"master_dp_only": False, "down_cast_bf16": True, "save_serially": True}, 2)):
        pl.save(state, str(tmp_path / str(files)), async_save=files == 1, **options)
        saved = pl.load(str(tmp_path / str(files)))["model"]  # waits for it
        assert len([*(tmp_path / str(files)).glob("tp_rank_0/*.safetensors")]) == files
        assert saved["w"].dtype == (torch.bfloat16 if options else torch.float32)


# -- mappings: those of tpcore.comm.mappings, whose values and gradients test_ops.py compares with torch ---------------
Case = tuple[str, dict[str, Any], Callable[..., Tensor], int]  # the name there, its function and dim here
CASES: list[Case] = [
    ("copy_to_tensor_model_parallel_region", {}, lambda x, comm, dim: ops.copy(x, comm), -1),
    ("reduce_from_tensor_model_parallel_region", {}, lambda x, comm, dim: ops.reduce(x, comm), -1),
    ("scatter_to_tensor_model_parallel_region", {}, ops.scatter, -1),
    ("gather_from_tensor_model_parallel_region", {}, ops.gather, -1),
    ("gather_from_tensor_model_parallel_region_with_dim", {"gather_dim": 1}, ops.gather, 1),
    ("reduce_scatter_to_tensor_model_parallel_region_with_dim", {"partition_dim": 1}, ops.reduce_scatter, 1),
    ("scatter_to_sequence_parallel_region", {}, ops.scatter, 0),
    ("gather_from_sequence_parallel_region", {}, ops.all_gather, 0),
    ("gather_from_sequence_parallel_region", {"to_model_parallel": False}, ops.gather, 0),
    ("reduce_scatter_to_sequence_parallel_region", {}, ops.reduce_scatter, 0),
    ("scatter_to_sequence_parallel_region", {"sequence_dimension": 1}, ops.scatter, 1),
    ("gather_from_sequence_parallel_region", {"sequence_dimension": -2}, ops.all_gather, -2),
    ("reduce_scatter_to_sequence_parallel_region", {"sequence_dimension": 1}, ops.reduce_scatter, 1),
]


def _mappings(ctx: ParallelContext, group: str) -> None:
    comm = ctx.comm("dp") if group == "dp" else ctx.comm("tp")
    given = {"none": None, "torch": parallel_state.get_tensor_model_parallel_group()}.get(group, comm)
    seeded = torch.Generator().manual_seed(ctx.rank)
    for name, keywords, function, dim in CASES:
        x = torch.randn(4, 8, 4, generator=seeded, dtype=torch.float64)
        mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, want = getattr(mappings, name)(mine, process_group=given, **keywords), function(plain, comm, dim)
        assert torch.equal(y, want), (name, keywords)
        grad = torch.randn(y.shape, generator=seeded, dtype=torch.float64)
        y.backward(grad)
        want.backward(grad)
        assert torch.equal(mine.grad, plain.grad), (name, keywords)


def test_mappings(pool: RankPool) -> None:
    for mesh, group in ((_mesh(1), "none"), (_mesh(2, dp=2), "dp"), (_mesh(4), "tp")):
        run_ranks(mesh, partial(_mappings, group=group))
    pool.run(_mesh(2, dp=2), _mappings, "torch")


@each_rank(dp=1, tp=4)
def test_by_position_and_with_a_wider_sum(ctx: ParallelContext) -> None:
    x = torch.full((2, 4), 1.0 if ctx.rank else 256.0, dtype=torch.bfloat16)
    assert mappings.gather_from_sequence_parallel_region(x, 1, False, ctx.comm("tp")).shape == (2, 16)
    assert mappings.scatter_to_sequence_parallel_region(x, 1, ctx.comm("tp")).shape == (2, 1)
    # bfloat16 has 8 bits: 256 + 1 is 256, and 259 is rounded to 260
    for dtype, total in ((torch.float32, 260.0), (None, 256.0)):
        sums = mappings.reduce_scatter_to_sequence_parallel_region(x, 1, None, dtype)
        assert sums.shape == (2, 1)
        assert float(sums[0]) == total


# -- random, utils ------------------------------------------------------------------------------------
def _draws(_: ParallelContext) -> tuple[Tensor, list[Tensor]]:
    pl.random.model_parallel_xla_manual_seed(3)
    tracker, inside = pl.random.get_xla_rng_tracker(), []
    for names in ((), ("model-parallel-rng",), ("mine",)):
        with tracker.fork(*names):
            inside.append(torch.rand(4))
    return torch.rand(4), inside


def test_random_streams() -> None:
    (outside, mine), (same, others) = run_ranks(_mesh(2), _draws)
    assert torch.equal(outside, same)
    drawn = torch.cat([*mine, *others])
    assert drawn.unique().numel() == drawn.numel()
    assert torch.equal(torch.cat(run_ranks(_mesh(2), _draws)[1][1]), torch.cat(others))


def test_utils() -> None:
    assert utils.divide(12, 4) == 3
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        utils.divide(12, 5)
    utils.ensure_divisibility(12, 4)
    x = torch.arange(24).view(4, 6)
    parts = pl.split_tensor_along_last_dim(x, 3)
    assert torch.equal(torch.cat(parts, -1), x)
    assert all(p.data_ptr() == x.data_ptr() + 16 * i for i, p in enumerate(parts))
    assert all(p.is_contiguous() for p in utils.split_tensor_along_last_dim(x, 3, True))
    assert [p.shape for p in utils.split_tensor_along_dim(x, 0, 2)] == [(2, 6), (2, 6)]
    assert [p.shape for p in utils.split_tensor_along_second_dim(x[None], 2)] == [(1, 2, 6), (1, 2, 6)]
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        utils.split_tensor_along_last_dim(x, 4)


def test_heads_that_divide_need_no_padding() -> None:
    model = nn.Linear(2, 2)
    assert pl.pad.pad_model(model, 4, 8, [nn.Linear], print) is model
    with pytest.raises(ValueError, match=r"n_heads=6\): .* pass pad=True to its projections, with sizes for 8 heads"):
        pl.pad.pad_model(model, tp_degree=4, n_heads=6)


def test_casts() -> None:
    single, double, whole = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    kinds = [torch.bfloat16, torch.float64, torch.int64]
    cast = utils.cast_all({"a": [single, double], "b": (whole, "text")})
    assert [t.dtype for t in (*cast["a"], cast["b"][0])] == kinds
    assert cast["b"][1] == "text"
    assert utils.cast_if_autocast_enabled(single, double) == (single, double)
    with torch.autocast("cpu", torch.bfloat16):
        assert [t.dtype for t in utils.cast_if_autocast_enabled(single, double, whole)] == kinds
        (inside,) = utils.cast_if_autocast_enabled({"x": single})
        assert inside["x"].dtype is torch.bfloat16


@each_rank(dp=1, tp=2)
def test_master_copies_count_as_cut(ctx: ParallelContext) -> None:
    layer = pl.ColumnParallelLinear(4, 4, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(torch.zeros(layer.weight.shape))
    master.grad = torch.ones_like(master)
    assert pl.clip_grad_norm(master, 1e9, 1) == 8  # this rank's half of the 16 ones
    pl.copy_tensor_model_parallel_attributes(destination_tensor=master, source_tensor=layer.weight)
    assert master.partition_dim == 0
    assert pl.clip_grad_norm(master, 1e9, 1) == 16  # all of them
