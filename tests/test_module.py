"""What a parallel layer is as an nn.Module: names, marks, moves, options that it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore import ops
from tpcore.context import ParallelContext
from tpcore.mesh import Mesh
from tpcore.module import sharding
from tpcore.shard import ShardSpec
from tpcore.testing import run_ranks

TWO = Mesh({"dp": 1, "tp": 2})


def on_two(fn: Callable[[ParallelContext], Any]) -> list[Any]:
    return run_ranks(TWO, fn)


LAYERS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "column": (lambda **k: tpcore.ColumnParallelLinear(4, 8, **k), lambda: nn.Linear(4, 8)),
    "column, not gathered": (
        lambda **k: tpcore.ColumnParallelLinear(4, 8, gather_output=False, **k),
        lambda: nn.Linear(4, 8),
    ),
    "column without bias": (
        lambda **k: tpcore.ColumnParallelLinear(4, 8, bias=False, **k),
        lambda: nn.Linear(4, 8, bias=False),
    ),
    "row": (lambda **k: tpcore.RowParallelLinear(4, 8, **k), lambda: nn.Linear(4, 8)),
    "embedding": (lambda **k: tpcore.ParallelEmbedding(8, 4, **k), lambda: nn.Embedding(8, 4)),
    "layer norm": (lambda **k: tpcore.LayerNorm(4, **k), lambda: nn.LayerNorm(4)),
    "layer norm without bias": (
        lambda **k: tpcore.LayerNorm(4, bias=False, **k),
        lambda: nn.LayerNorm(4, bias=False),
    ),
    "rms norm": (lambda **k: tpcore.RMSNorm(4, **k), lambda: nn.RMSNorm(4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_state_dict_has_the_keys_of_the_plain_layer(name: str) -> None:
    ours, plain = LAYERS[name]
    on_two(lambda ctx: keys_are(ours(), list(plain().state_dict())))


def keys_are(layer: nn.Module, keys: list[str]) -> None:
    assert list(layer.state_dict()) == keys
    assert [k for k, _ in layer.named_parameters()] == keys


def test_repr_says_the_logical_and_the_local_shape() -> None:
    def rank(ctx: ParallelContext) -> None:
        assert repr(tpcore.ColumnParallelLinear(4, 8)) == (
            "ColumnParallelLinear(in_features=4, out_features=8, bias=True, "
            "weight=(8, 4), local=(4, 4), tp=2)"
        )
        assert repr(tpcore.RowParallelLinear(5, 8, bias=False, pad=True)) == (
            "RowParallelLinear(in_features=5, out_features=8, bias=False, weight=(8, 5), local=(8, 3), tp=2)"
        )
        assert repr(tpcore.ParallelEmbedding(8, 4, padding_idx=-1)) == (
            "ParallelEmbedding(8, 4, padding_idx=7, weight=(8, 4), local=(4, 4), tp=2)"
        )
        assert repr(tpcore.LayerNorm(4, sequence_parallel_enabled=True)) == (
            "LayerNorm((4,), eps=1e-05, sequence_parallel=True)"
        )

    on_two(rank)


def test_specs_of_a_model_cover_its_state() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = tpcore.ColumnParallelLinear(4, 8, stride=2)
            self.plain = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(3))

    def rank(ctx: ParallelContext) -> None:
        assert tpcore.shard_specs(Model()) == {
            "up.weight": ShardSpec.strided((8, 4), 0, 2),
            "up.bias": ShardSpec.strided((8,), 0, 2),
            "plain.weight": ShardSpec((4, 4)),
            "plain.bias": ShardSpec((4,)),
            "count": ShardSpec((3,)),
        }

    on_two(rank)


def test_marks_that_other_libraries_scripts_read() -> None:
    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8, stride=2)
        weight = layer.weight
        marks = (
            weight.tensor_model_parallel,
            weight.partition_dim,
            weight.partition_stride,
            weight.num_partitions,
        )
        assert marks == (True, 0, 2, 2)
        bias = tpcore.RowParallelLinear(4, 8).bias
        assert (bias.tensor_model_parallel, bias.partition_dim, bias.num_partitions) == (False, -1, 1)
        for tensor in (layer.state_dict()["weight"], copy.deepcopy(layer).weight, layer.double().weight):
            found = sharding(tensor)
            assert found is not None
            assert found.spec == layer.shard_specs["weight"]
        assert sharding(nn.Linear(2, 2).weight) is None

    on_two(rank)


def test_a_copy_is_its_own_and_talks_to_the_same_ranks() -> None:
    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.RowParallelLinear(4, 2)
        again = copy.deepcopy(layer)
        assert again.tp is layer.tp
        with torch.no_grad():
            again.weight.zero_()
        assert layer.weight.any()
        x = torch.ones(3, 4)
        assert torch.equal(again(x), layer.bias.expand(3, 2))

    on_two(rank)


def test_a_state_dict_is_plain_data() -> None:
    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded["weight"], layer.weight)
        assert pickle.loads(pickle.dumps(layer.state_dict())).keys() == layer.state_dict().keys()

    on_two(rank)


def test_moving_keeps_ties_and_attributes() -> None:
    def rank(ctx: ParallelContext) -> None:
        model = nn.ModuleList([tpcore.ParallelEmbedding(8, 4), tpcore.ColumnParallelLinear(4, 8, bias=False)])
        model[1].weight = model[0].weight
        model[0].weight.mine = "kept"
        assert tpcore.move_model_to_device(model, "meta") is model
        assert model[0].weight is model[1].weight
        assert model[0].weight.is_meta
        assert model[0].weight.mine == "kept"
        assert sharding(model[0].weight) is not None

    on_two(rank)


# -- behaviour under torch's modes -------------------------------------------------------------------------

INPUTS: dict[str, Callable[[], Tensor]] = {"embedding": lambda: torch.randint(8, (2, 4))}
CALLS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "column": lambda: (tpcore.ColumnParallelLinear(8, 8), torch.randn(4, 8)),
    "column, not gathered": lambda: (
        tpcore.ColumnParallelLinear(8, 8, gather_output=False),
        torch.randn(4, 8),
    ),
    "column, padded": lambda: (
        tpcore.ColumnParallelLinear(8, 7, gather_output=False, pad=True),
        torch.randn(4, 8),
    ),
    "column, sequence parallel": lambda: (
        tpcore.ColumnParallelLinear(8, 8, sequence_parallel_enabled=True),
        torch.randn(4, 8),
    ),
    "row": lambda: (tpcore.RowParallelLinear(8, 8), torch.randn(4, 8)),
    "row, sequence parallel": lambda: (
        tpcore.RowParallelLinear(8, 8, input_is_parallel=True, sequence_parallel_enabled=True),
        torch.randn(4, 8 // tpcore.current().comm("tp").size),
    ),
    "embedding": lambda: (tpcore.ParallelEmbedding(8, 8), torch.randint(8, (2, 4))),
    "embedding, padding": lambda: (tpcore.ParallelEmbedding(8, 8, 0), torch.randint(8, (2, 4))),
    "embedding by columns": lambda: (
        tpcore.ParallelEmbedding(8, 8, 0, shard_across_embedding=True),
        torch.randint(8, (2, 4)),
    ),
    "embedding, sequence parallel": lambda: (
        tpcore.ParallelEmbedding(8, 8, sequence_parallel_enabled=True),
        torch.randint(8, (2, 4)),
    ),
    "layer norm": lambda: (tpcore.LayerNorm(8, sequence_parallel_enabled=True), torch.randn(4, 8)),
    "rms norm": lambda: (tpcore.RMSNorm(8), torch.randn(4, 8)),
}
at_tp_1_and_2 = pytest.mark.parametrize("tp", [1, 2])


@at_tp_1_and_2
@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_the_same_values(name: str, tp: int) -> None:
    def rank(ctx: ParallelContext) -> None:
        torch.manual_seed(0)
        layer, x = CALLS[name]()
        want = layer(x)
        assert want.requires_grad
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got = layer(x)
            assert not got.requires_grad
            assert torch.equal(got, want)
        layer.requires_grad_(False)
        assert torch.equal(layer(x), want)
        assert not layer(x).requires_grad

    run_ranks(Mesh({"tp": tp}), rank)


@at_tp_1_and_2
@pytest.mark.parametrize("name", CALLS)
def test_the_output_may_be_changed_in_place(name: str, tp: int) -> None:
    """As that of nn.Linear: ``relu(inplace=True)``, ``+= residual``."""
    changes: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda y: F.relu(y, inplace=True), F.relu),
        (lambda y: y.add_(1), lambda y: y + 1),
        (lambda y: y.mul_(2), lambda y: y * 2),
    ]

    def rank(ctx: ParallelContext) -> None:
        torch.manual_seed(0)
        layer, x = CALLS[name]()
        before = layer.weight.detach().clone()
        for in_place, plain in changes:
            grads = []
            for change in (in_place, plain):
                layer.zero_grad()
                change(layer(x)).square().sum().backward()
                grads.append(layer.weight.grad.clone())
            assert torch.equal(*grads)
        assert torch.equal(layer.weight, before)

    run_ranks(Mesh({"tp": tp}), rank)


@at_tp_1_and_2
@pytest.mark.parametrize("name", ["column", "row"])
@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "weight and bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(name: str, tp: int, frozen: str) -> None:
    torch.manual_seed(0)
    plain, x, grad = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    leaf = x.clone().requires_grad_()
    plain(leaf).backward(grad)

    def rank(ctx: ParallelContext) -> None:
        layer, _ = CALLS[name]()
        n, r = ctx.comm("tp").size, ctx.coord("tp")
        layer.load_state_dict({k: s.shard(plain.state_dict()[k], r, n) for k, s in layer.shard_specs.items()})
        for key, p in layer.named_parameters():
            p.requires_grad_(key not in frozen)
        mine = x.clone().requires_grad_(frozen != "input")
        layer(mine).backward(grad)
        assert (mine.grad is None) == (frozen == "input")
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, leaf.grad, rtol=0, atol=1e-5)  # float32, sums of 8
        for key, p in layer.named_parameters():
            assert (p.grad is None) == (key in frozen)
            if p.grad is not None:
                want = layer.shard_specs[key].shard(plain.get_parameter(key).grad, r, n)
                torch.testing.assert_close(p.grad, want, rtol=0, atol=1e-5)

    run_ranks(Mesh({"tp": tp}), rank)


@at_tp_1_and_2
@pytest.mark.parametrize("name", ["column", "row"])
def test_autocast(name: str, tp: int) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 8), torch.randn(4, 8)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(leaf)
    want.sum().backward()

    def rank(ctx: ParallelContext) -> None:
        layer, _ = CALLS[name]()
        n, r = ctx.comm("tp").size, ctx.coord("tp")
        layer.load_state_dict({k: s.shard(plain.state_dict()[k], r, n) for k, s in layer.shard_specs.items()})
        mine = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(mine)
        y.sum().backward()
        assert y.dtype == torch.bfloat16
        # bfloat16 has 8 bits; three roundings of values below 4
        torch.testing.assert_close(y, want, rtol=0, atol=3 * 2**-7)
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, leaf.grad, rtol=0, atol=3 * 2**-7)
        shard = layer.shard_specs["weight"].shard(plain.weight.grad, r, n)
        assert layer.weight.grad.dtype == torch.float32
        torch.testing.assert_close(layer.weight.grad, shard, rtol=0, atol=3 * 2**-7)

    run_ranks(Mesh({"tp": tp}), rank)


def test_gradients_accumulate_over_calls() -> None:
    def rank(ctx: ParallelContext) -> None:
        for name in ("column", "row", "embedding"):
            torch.manual_seed(0)
            layer, x = CALLS[name]()
            (layer(x) + layer(x)).sum().backward()
            twice = layer.weight.grad.clone()
            layer.zero_grad()
            layer(x).sum().backward()
            layer(x).sum().backward()
            assert torch.equal(layer.weight.grad, twice)

    on_two(rank)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "layer norm"])
def test_no_tokens(name: str, shape: tuple[int, ...]) -> None:
    def rank(ctx: ParallelContext) -> None:
        layer, x = CALLS[name]()
        leaf = x.new_zeros(shape if "embedding" in name else (*shape, x.shape[-1]))
        if x.is_floating_point():
            leaf.requires_grad_()
        y = layer(leaf)
        assert y.numel() == 0
        y.sum().backward()
        assert not layer.weight.grad.any()
        assert leaf.grad is None or leaf.grad.shape == leaf.shape

    on_two(rank)


@at_tp_1_and_2
@pytest.mark.parametrize("name", ["column", "column, sequence parallel", "row", "row, sequence parallel"])
def test_a_second_derivative_is_refused_not_wrong(name: str, tp: int) -> None:
    def rank(ctx: ParallelContext) -> None:
        layer, x = CALLS[name]()
        y = layer(x.requires_grad_())
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()

    run_ranks(Mesh({"tp": tp}), rank)


def test_bias_left_to_the_caller_is_the_one_to_add() -> None:
    def rank(ctx: ParallelContext) -> None:
        torch.manual_seed(0)
        x, tp = torch.randn(4, 8), ctx.comm("tp")
        for make in (tpcore.ColumnParallelLinear, tpcore.RowParallelLinear):
            layer = make(8, 8, skip_bias_add=True)
            y, bias = layer(x)
            layer.skip_bias_add = False
            assert torch.equal(layer(x), y + bias)
            assert make(8, 8, bias=False, skip_bias_add=True)(x)[1] is None
        partial = tpcore.RowParallelLinear(8, 8, bias=False, input_is_parallel=True, reduce_output=False)
        whole = tpcore.RowParallelLinear(8, 8, bias=False, input_is_parallel=True)
        whole.load_state_dict(partial.state_dict())
        mine = ops.scatter(x, tp)
        assert torch.equal(ops.reduce(partial(mine), tp), whole(mine))

    on_two(rank)


# -- what is refused ---------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "column, uneven": (
        lambda: tpcore.ColumnParallelLinear(4, 9),
        ValueError,
        "ColumnParallelLinear: output_size=9 is not divisible by tp=2; pass pad=True",
    ),
    "row, uneven": (
        lambda: tpcore.RowParallelLinear(9, 4),
        ValueError,
        "RowParallelLinear: input_size=9 is not divisible by tp=2; pass pad=True",
    ),
    "column, uneven parts": (
        lambda: tpcore.ColumnParallelLinear(4, 18, stride=2),
        ValueError,
        "output_size=18 in 2 parts is not divisible by tp=2",
    ),
    "stride": (
        lambda: tpcore.ColumnParallelLinear(4, 8, stride=3, pad=True),
        ValueError,
        "stride 3 does not divide size 8",
    ),
    "embedding, uneven": (
        lambda: tpcore.ParallelEmbedding(9, 4),
        ValueError,
        "ParallelEmbedding: num_embeddings=9 is not divisible by tp=2; pass pad=True",
    ),
    "embedding, uneven columns": (
        lambda: tpcore.ParallelEmbedding(8, 5, shard_across_embedding=True),
        ValueError,
        "embedding_dim=5 is not divisible by tp=2",
    ),
    "padding_idx": (
        lambda: tpcore.ParallelEmbedding(8, 4, 8),
        ValueError,
        "padding_idx=8 is outside a vocabulary of 8",
    ),
    "uncollected rows": (
        lambda: tpcore.ParallelEmbedding(8, 4, collect_output=False),
        ValueError,
        "collect_output=False needs shard_across_embedding=True",
    ),
    "sequence dimension alone": (
        lambda: tpcore.ColumnParallelLinear(4, 8, sequence_dimension=1),
        ValueError,
        "sequence_dimension=1 without sequence_parallel_enabled=True",
    ),
    "row, sequence parallel of whole input": (
        lambda: tpcore.RowParallelLinear(4, 8, sequence_parallel_enabled=True),
        ValueError,
        "needs input_is_parallel=True and reduce_output=True, not False and True",
    ),
    "row, bias on partial sums": (
        lambda: tpcore.RowParallelLinear(4, 8, reduce_output=False),
        ValueError,
        "would add the bias once per rank",
    ),
    "ids": (
        lambda: tpcore.ParallelEmbedding(8, 4)(torch.tensor([0, 8])),
        IndexError,
        "ParallelEmbedding: ids from 0 to 8 do not fit a vocabulary of 8",
    ),
    "negative ids": (
        lambda: tpcore.ParallelEmbedding(8, 4)(torch.tensor([-1])),
        IndexError,
        "ids from -1 to -1",
    ),
    "ids in the padding": (
        lambda: tpcore.ParallelEmbedding(7, 4, pad=True)(torch.tensor([7])),
        IndexError,
        "ids from 7 to 7 do not fit a vocabulary of 7",
    ),
    "tokens that tp does not divide": (
        lambda: tpcore.ParallelEmbedding(8, 4, sequence_parallel_enabled=True)(
            torch.zeros(3, dtype=torch.int64)
        ),
        ValueError,
        r"cannot split dim 0 of shape \(3, 4\) over \('tp',\) of size 2: not divisible",
    ),
    "input that tp does not divide": (
        lambda: tpcore.RowParallelLinear(4, 8)(torch.zeros(2, 3)),
        ValueError,
        r"cannot split dim 1 of shape \(2, 3\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank_with_the_values_and_the_remedy(name: str) -> None:
    call, error, said = REFUSED[name]

    def rank(ctx: ParallelContext) -> None:
        with pytest.raises(error, match=said):
            call()

    on_two(rank)


def test_wrong_shapes_are_an_error_of_loading() -> None:
    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8)
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict(nn.Linear(4, 8).state_dict())

    on_two(rank)
