"""What a parallel layer is as an nn.Module: names, marks, moves, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.worlds import by_call, each_rank
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

import tpcore
from tpcore.layout.shard import ShardSpec
from tpcore.runtime.context import ParallelContext


@each_rank(dp=1, tp=2)
def test_repr_says_the_logical_and_the_local_shape(ctx: ParallelContext) -> None:
    assert repr(tpcore.ColumnParallelLinear(4, 8)) == (
        "ColumnParallelLinear(in_features=4, out_features=8, bias=True, weight=(8, 4), local=(4, 4), tp=2)"
    )
    assert repr(tpcore.RowParallelLinear(5, 8, bias=False, pad=True)) == (
        "RowParallelLinear(in_features=5, out_features=8, bias=False, weight=(8, 5), local=(8, 3), tp=2)"
    )
    assert repr(tpcore.ParallelEmbedding(8, 4, padding_idx=-1)) == (
        "ParallelEmbedding(8, 4, padding_idx=7, weight=(8, 4), local=(4, 4), tp=2)"
    )
    assert repr(tpcore.LayerNorm(4, sequence_parallel=True)) == ("LayerNorm((4,), eps=1e-05, sequence_parallel=True)")


@each_rank(dp=1, tp=2)
def test_specs_of_a_model_cover_its_state(ctx: ParallelContext) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = tpcore.ColumnParallelLinear(4, 8, blocks=2)
            self.plain = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(3))

    assert tpcore.layers.shard_specs(Model()) == {
        "up.weight": ShardSpec.strided((8, 4), 0, 2),
        "up.bias": ShardSpec.strided((8,), 0, 2),
        "plain.weight": ShardSpec((4, 4)),
        "plain.bias": ShardSpec((4,)),
        "count": ShardSpec((3,)),
    }


@each_rank(dp=1, tp=2)
def test_a_copy_is_its_own_and_talks_to_the_same_ranks(ctx: ParallelContext) -> None:
    layer = tpcore.RowParallelLinear(4, 2)
    again = copy.deepcopy(layer)
    assert again.tp is layer.tp
    with torch.no_grad():
        again.weight.zero_()
    assert layer.weight.any()
    x = torch.ones(3, 4)
    assert torch.equal(again(x), layer.bias.expand(3, 2))


@each_rank(dp=1, tp=2)
def test_a_part_is_in_no_file_as_the_whole(ctx: ParallelContext, tmp_path: Path) -> None:
    layer, file = tpcore.RowParallelLinear(4, 8), io.BytesIO()
    state = layer.state_dict()
    for save in (
        lambda: torch.save(state, file),
        lambda: pickle.dumps(layer.weight),
        lambda: safetensors.torch.save(state),
        lambda: safetensors.torch.save_file(state, tmp_path / "part"),
        lambda: safetensors.torch.save_model(layer, str(tmp_path / "part")),
    ):
        with pytest.raises(
            ValueError, match=r"of shape \(8, 2\) is one rank's part of \(8, 4\).*write the whole model"
        ):
            save()
    file = io.BytesIO()
    torch.save({"bias": state["bias"], "weight": state["weight"].clone()}, file)  # as plain data; a clone has no mark
    file.seek(0)
    assert torch.load(file, weights_only=True)["bias"].shape == (8,)


MASKS: dict[str, Any] = {
    "l1": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "structured": lambda m: prune.random_structured(m, name="weight", amount=0.5, dim=0),
    "global": lambda m: prune.global_unstructured([(m, "weight")], prune.L1Unstructured, amount=0.5),
    "a mask": lambda m: prune.custom_from_mask(m, name="weight", mask=torch.ones(4, 4)),
}


@pytest.mark.parametrize("how", MASKS)
@each_rank(dp=1, tp=2)
def test_a_rank_does_not_prune_by_a_threshold_of_its_own(ctx: ParallelContext, how: str) -> None:
    layer = tpcore.ColumnParallelLinear(4, 8)
    with pytest.raises(ValueError, match=r"Linear\.weight is this rank's part, of shape \(4, 4\), and a mask for it"):
        MASKS[how](layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    MASKS[how](nn.Linear(4, 4))


INITS: dict[str, Any] = {
    "xavier": lambda t: nn.init.xavier_normal_(t, gain=2.0),
    "normal": lambda t: nn.init.normal_(t, std=0.02),
    "orthogonal": lambda t: nn.init.orthogonal_(t, gain=2.0),
    "constant": lambda t: nn.init.constant_(tensor=t, val=0.5),
}


@pytest.mark.parametrize("how", INITS)
@pytest.mark.parametrize("kind", [tpcore.ColumnParallelLinear, tpcore.RowParallelLinear])
@each_rank(dp=1, tp=2)
def test_torchs_initial_values_are_those_of_the_whole(ctx: ParallelContext, kind: Any, how: str) -> None:
    layer, whole = kind(6, 8, bias=False), torch.empty(8, 6)
    torch.manual_seed(3)
    INITS[how](whole)
    after = torch.rand(1)
    torch.manual_seed(3)
    INITS[how](layer.weight)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(layer.weight, layer.part_of("weight", whole))


def zeros(gradient: torch.Tensor) -> None:
    gradient[:3] = 0


HOOKS: dict[str, Any] = {
    "rows": lambda g: torch.cat([g[:3] * 0, g[3:]]),
    "a norm": lambda g: g / g.norm(),
    "in place": zeros,
    "a note": lambda g: None,
}


class Passing(TorchFunctionMode):
    """It asks torch's functions once more, from inside."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, Passing])
@pytest.mark.parametrize("how", HOOKS)
@each_rank(dp=1, tp=2)
def test_a_hook_of_a_parameter_gets_the_gradient_of_the_whole(ctx: ParallelContext, how: str, mode: Any) -> None:
    torch.manual_seed(1)
    x, table = torch.randn(5, 6), nn.Embedding(8, 6)
    for plain, layer in (
        (up := nn.Linear(6, 8), tpcore.ColumnParallelLinear.from_plain(up)),
        (down := nn.Linear(6, 8), tpcore.RowParallelLinear.from_plain(down)),
        (table, tpcore.ParallelEmbedding.from_plain(table)),
    ):
        for module in (plain, layer):
            with mode():
                module.weight.register_hook(HOOKS[how])
            given = torch.tensor([1, 4, 7, 7]) if plain is table else x
            module(given).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, layer.part_of("weight", plain.weight.grad))


# -- what is refused ---------------------------------------------------------------------------------------

REFUSED = by_call(r"""
ColumnParallelLinear(4, 9)
    ColumnParallelLinear: out_features=9 is not divisible by tp=2; pass pad=True
RowParallelLinear(9, 4)
    RowParallelLinear: in_features=9 is not divisible by tp=2; pass pad=True
ColumnParallelLinear(4, 18, blocks=2)
    out_features=18 in 2 parts is not divisible by tp=2
ColumnParallelLinear(4, 8, blocks=3, pad=True)
    stride 3 does not divide size 8
ParallelEmbedding(9, 4)
    ParallelEmbedding: num_embeddings=9 is not divisible by tp=2; pass pad=True
ParallelEmbedding(8, 5, shard_across_embedding=True)
    embedding_dim=5 is not divisible by tp=2
layout.divide(7, 2, "heads")
    heads=7 is not divisible by 2
ParallelEmbedding(8, 4, 8)
    padding_idx=8 is outside a vocabulary of 8
RowParallelLinear(4, 8, sequence_dim=0)
    RowParallelLinear\(sequence_dim=0\) needs input_is_parallel=True
ParallelEmbedding(8, 4)(torch.tensor([0, 8]))
    ParallelEmbedding: ids from 0 to 8 do not fit a vocabulary of 8
ParallelEmbedding(8, 4)(torch.tensor([-1]))
    ids from -1 to -1
ParallelEmbedding(7, 4, pad=True)(torch.tensor([7]))
    ids from 7 to 7 do not fit a vocabulary of 7
ParallelEmbedding(8, 4, sequence_dim=0)(torch.zeros(3, dtype=torch.int64))
    cannot split dim 0 of shape \(3, 4\) over \('tp',\) of size 2: not divisible; pad it \(a sequence, for
    instance\) to a multiple of 2
RowParallelLinear(4, 8)(torch.zeros(2, 3))
    RowParallelLinear: the input of shape \(2, 3\) has 3 features, and the layer takes 4$
RowParallelLinear(4, 8)(torch.zeros(2, 2))
    has 2 features, .* takes 4; 2 is the part of one of tp=2 ranks: pass input_is_parallel=True
RowParallelLinear(4, 8, input_is_parallel=True)(torch.zeros(2, 4))
    has 4 features, .* takes 2 of in_features=4 on each rank; these .* leave out input_is_parallel=True
ColumnParallelLinear(4, 8)(torch.zeros(2, 3))
    ColumnParallelLinear: the input of shape \(2, 3\) has 3 features, and the layer takes 4$
ColumnParallelLinear(4, 8)(torch.zeros(2, 2))
    takes 4; 2 is the part of one of tp=2 ranks: gather it first .* input_is_parallel=True
torch.func.functional_call(ColumnParallelLinear(4, 8), {"weight": torch.ones(8, 4)}, (torch.ones(2, 4),))
    functional_call: weight is this rank's part of \(8, 4\), of shape \(4, 4\), and not \(8, 4\): .* part_of
""")


@pytest.mark.parametrize("call", REFUSED)
@each_rank(dp=1, tp=2)
def test_refused_on_every_rank_with_the_values_and_the_remedy(ctx: ParallelContext, call: str) -> None:
    error = IndexError if "ids from" in REFUSED[call] else ValueError
    with pytest.raises(error, match=REFUSED[call]):
        eval(call, {**vars(tpcore), "torch": torch})


@each_rank(dp=1, tp=2)
def test_each_rank_takes_its_part_of_a_whole_state_dict(ctx: ParallelContext) -> None:
    layer, plain = tpcore.ColumnParallelLinear(4, 7, pad=True), nn.Linear(4, 7)
    whole = {name: torch.arange(p.numel()).view_as(p).float() for name, p in plain.state_dict().items()}
    layer.load_state_dict(whole)
    x = torch.ones(2, 4)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, whole["weight"], whole["bias"]))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict(nn.Linear(4, 9).state_dict())
