"""What no pipeline can run is refused before anything starts, and what goes wrong in a tick is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.pipelines import WIDTH, Block, batch_of, cut, plain
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.errors import PeerLostError
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks


def mesh(pp: int, tp: int = 1) -> Mesh:
    return Mesh({"pp": pp, "dp": 1, "tp": tp})


def linears(*widths: int) -> list[nn.Module]:
    return [nn.Linear(2, width) for width in widths]


class Kind(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(2, 2)
        self.attention_type = kind


X = torch.ones(4, 2)
SHARED = nn.Linear(2, 2)

LAYERS: dict[str, tuple[list[nn.Module], int, str]] = {
    "uneven": (linears(*[2] * 12), 5, "12 layers do not divide into pp=5.* 1, 2, 3, 4, 6 or 12 .* 10 or 15 l"),
    "fewer than stages": (linears(2, 2), 3, "2 layers do not divide into pp=3 .* a model of 3 layers"),
    "none": ([], 2, "no layers"),
    "of other shapes": (linears(2, 3), 2, r"layers 0 and 1 .* weight is torch.float32 \[2, 2\] .* \[3, 2\]"),
    "of other classes": ([nn.Linear(2, 2), nn.Identity()], 2, "the layer is Linear in the one and Identity"),
    "shared": ([SHARED, SHARED], 2, "layers 0 and 1 share a parameter, weight"),
    "of two kinds": (
        [Kind("full"), Kind("sliding"), Kind("full"), Kind("sliding")],
        2,
        "two kinds: attention_type is 'full' and 'sl",
    ),
    "frozen in part": ([nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)], 2, "without gradient"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_make_no_stages(case: str) -> None:
    layers, pp, said = LAYERS[case]
    with pytest.raises(ValueError, match=said):
        run_ranks(mesh(pp), lambda ctx: tpcore.PipelinedLayers(layers, 2))


@each_rank(pp=2, dp=1, tp=1)
def test_a_pattern_that_each_stage_repeats(ctx: ParallelContext) -> None:
    torch.manual_seed(0)
    pattern = [nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh()]
    want = nn.Sequential(*pattern)(X)
    torch.testing.assert_close(tpcore.PipelinedLayers(pattern, 2)(X), want)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Balancing(nn.Module):
    """Puts a loss of its own aside, for the model to add up."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.square().mean()
        return x


class Attentive(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Cache:
    pass


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "batch": (nn.Tanh, (torch.ones(6, 2),), {}, "batch of 6 .* num_microbatches=4: 1, 2, 3, 6 would do"),
    "empty": (nn.Tanh, (torch.ones(0, 2),), {}, "batch of 0 .* empty"),
    "statistics": (Statistics, (torch.ones(8, 2),), {}, "layers change '0.norm.num_batches_tracked' as they run"),
    "a loss of its own": (Balancing, (X,), {}, "layers change '0.loss' as they run"),
    "shapes": (lambda: nn.Linear(2, 3), (X,), {}, r"float32 \(1, 3\) of torch.float32 \(1, 2\)"),
    "two values": (Attentive, (X,), {}, "returned 2 values"),
    "a cache": (Block, (torch.ones(4, 3, WIDTH), Cache()), {}, "get mix, a Cache: .* use_cache=False"),
    "no input": (nn.Tanh, (), {"other": 3}, "without 'input'"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_no_pipeline_runs(case: str) -> None:
    make, args, kwargs, said = CALLS[case]
    with pytest.raises((ValueError, TypeError), match=said):
        run_ranks(mesh(1), lambda ctx: tpcore.PipelinedLayers([make()], 4)(*args, **kwargs))


@each_rank(pp=2, dp=1, tp=1)
def test_part_of_the_layers(ctx: ParallelContext) -> None:
    layers = tpcore.PipelinedLayers(linears(2, 2), 2)
    assert [*layers[:2]] == [*layers] == [layers[0]] == [layers]
    assert layers.in_features == 2
    for index in (slice(0, 1), 1):
        with pytest.raises(ValueError, match="of 2 pipelined layers"):
            layers[index]


def test_numbers_of_microbatches() -> None:
    for number in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="num_microbatches must be a whole number"):
            run_ranks(mesh(1), lambda ctx, n=number: tpcore.PipelinedLayers(linears(2), n))


# -- the engine -------------------------------------------------------------------------------------------
class Adds(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias


class Odd(nn.Module):
    """Lists of layers, and a forward of the first of them."""

    def __init__(self, forward: Callable[..., Tensor], **lists: nn.Module) -> None:
        super().__init__()
        self.run, self.bias = forward, nn.Parameter(torch.ones(2))
        for name, layer in lists.items():
            self.add_module(name, nn.ModuleList([layer]))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def looped(model: Any, x: Tensor, *others: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x, *others)
    return x


MODELS: dict[str, tuple[Callable[..., Tensor], dict[str, type[nn.Module]], str]] = {
    "two lists": (
        looped,
        {"encoder": nn.Identity, "decoder": nn.Identity},
        "several lists of layers, encoder, decoder.*model.encoder = tpcore.PipelinedLayers",
    ),
    "no list": (looped, {}, "no nn.ModuleList"),
    "layers not called": (lambda m, x: x.sum(), {"layers": nn.Identity}, "does not call its pipelined layers"),
    "no loss": (looped, {"layers": nn.Identity}, "no loss of one element, but a Tensor"),
    "called twice": (
        lambda m, x: looped(m, looped(m, x)).sum(),
        {"layers": nn.Identity},
        "calls its pipelined layers 2 times",
    ),
    "an argument with a gradient": (
        lambda m, x: looped(m, x, m.bias).sum(),
        {"layers": Adds},
        "get bias, which takes a gradient",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_the_engine_cannot_run(case: str) -> None:
    forward, lists, said = MODELS[case]
    model = Odd(forward, **{name: kind() for name, kind in lists.items()})
    with pytest.raises(ValueError, match=said):
        run_ranks(mesh(1), lambda ctx: tpcore.PipelineModel(model, 2).run_train(X))


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="a batch of 6 does not divide into num_microbatches=4"):
        run_ranks(mesh(2), lambda ctx: tpcore.PipelineModel(plain(2), 4).run_train(**batch_of(6)))


@each_rank(pp=1, dp=1, tp=1)
def test_one_stage_takes_any_batch_where_nothing_is_trained(ctx: ParallelContext) -> None:
    dense, batch = plain(2).eval(), batch_of(3)
    model = plain(2)
    model.layers = tpcore.PipelinedLayers(model.layers, 4)
    with pytest.raises(ValueError, match="a batch of 3 does not divide into num_microbatches=4"):
        model(**batch)
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch), dense(**batch))


def test_a_kind_of_loss() -> None:
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        run_ranks(mesh(1), lambda ctx: tpcore.PipelineModel(plain(2), 4, loss="max"))  # type: ignore[arg-type]


# -- a rank that is lost ----------------------------------------------------------------------------------
class Failing(nn.Module):
    """Fails in the third microbatch of a stage."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.runs = layer, 0

    def forward(self, x: Tensor, mix: Tensor, *, scale: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 3:
            raise ArithmeticError("the third microbatch")
        y: Tensor = self.layer(x, mix, scale=scale)
        return y


def fails(ctx: ParallelContext, engine: str) -> str:
    model = cut(4, ctx)
    pipe = tpcore.PipelineModel(model, 4)
    model.layers.shared = ["mix"]
    if ctx.coord("pp") == 1:
        name, layer = next(iter(pipe.layers.named_children()))
        pipe.layers.add_module(name, Failing(layer))
    try:
        pipe.run_train(**batch_of(4)) if engine == "lockstep" else model(**batch_of(4)).backward()
    except (ArithmeticError, PeerLostError) as e:
        return f"{type(e).__name__}: {e}"
    return "went through"


@pytest.mark.parametrize("engine", ["layers", "lockstep"])
def test_a_rank_that_fails_in_a_tick_is_named_on_all(engine: str) -> None:
    first, second = [], []

    def rank(ctx: ParallelContext) -> None:
        (second if ctx.coord("pp") else first).append(fails(ctx, engine))
        if ctx.coord("pp"):
            raise ArithmeticError("the third microbatch")

    with pytest.raises(ArithmeticError):
        run_ranks(mesh(2), rank)
    assert second == ["ArithmeticError: the third microbatch"]
    assert "rank 1 failed with ArithmeticError: the third microbatch" in first[0]
