"""The law of dropout in a sharded model: other masks where the ranks' data differ, one where they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import families
from helpers.hf import recompute
from helpers.tiers import tiers
from helpers.worlds import each_rank
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

TWO = Mesh({"tp": 2})
Dropped = tuple[str, Tensor, Tensor]
"""A function that drops elements, its input, and where it kept them."""


class Recorder(TorchFunctionMode):
    """Every mask that a forward draws, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Dropped] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" and kwargs.get("dropout_p"):
            state, (query, key) = torch.get_rng_state(), args[:2]
            each = torch.eye(key.shape[2], dtype=query.dtype).expand(*key.shape[:3], -1)  # its own weights
            weights = func(query, key, each, *args[3:], **kwargs)
            torch.set_rng_state(state)
            self.masks.append((name, query.detach(), weights != 0))
        out = func(*args, **kwargs)
        if name == "dropout" and kwargs.get("p") and kwargs.get("training"):
            self.masks.append((name, args[0].detach(), out.detach() != 0))
        return out


def dropping(family: str, **options: Any) -> Any:
    """A tiny model of ``family`` in which every dropout is on."""
    config = families.config_of(family)
    for name in families.DROPOUTS.split():
        if getattr(config, name, None) == 0.0 and "layerdrop" not in name and "path" not in name:
            setattr(config, name, 0.3)
    for name, value in (SPECIAL.get(family, {}) | options).items():
        setattr(config, name, value)
    kind: Any = families.class_of(family)
    return families.made(kind, config)


def masks(family: str, mesh: Mesh, features: dict[str, Any], **options: Any) -> list[list[Dropped]]:
    """What one step in training drops, on each rank."""

    def rank(ctx: tpcore.ParallelContext) -> list[Dropped]:
        model: Any = tpcore.parallelize(dropping(family, **features), **options)
        tpcore.random.manual_seed(3)
        cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        with Recorder() as recorder:
            model.train()(**families.batch_of(model), **cache)
        return recorder.masks

    return run_ranks(mesh, rank)


def check_law(ranks: list[list[Dropped]]) -> tuple[int, int]:
    """Assert the law over ranks; how many masks were replicated, and how many were of the ranks' own data."""
    first, second = ranks
    assert [name for name, *_ in first] == [name for name, *_ in second]
    replicated = 0
    for i, ((name, x, kept), (_, y, other)) in enumerate(zip(first, second, strict=True)):
        alike = x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=1e-9)
        # zeros that were there before tell nothing
        where = (x != 0) & (y != 0) if name == "dropout" and x.shape == y.shape else ...
        same = kept.shape == other.shape and torch.equal(kept[where], other[where])
        assert same == alike, f"draw {i}, {name} of {tuple(x.shape)}: data alike {alike}, masks alike {same}"
        replicated += alike
    return replicated, len(first) - replicated


LIST = ["bert", "gpt2", "t5", "opt", "bart", "bloom", "vit", "deberta-v2", "gptj", "gpt_bigcode"]
OTHERS = sorted(families.on_the_page("Work").keys() - {*LIST})
POSITIONS = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
SPECIAL: dict[str, dict[str, Any]] = {"deberta-v2": POSITIONS}


@pytest.mark.filterwarnings("ignore")  # what transformers and torch say of tiny models of odd sizes
@pytest.mark.parametrize("family", LIST)
def test_ranks_drop_apart_where_their_data_differ_and_alike_elsewhere(family: str) -> None:
    assert apart(family)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", tiers([], OTHERS[::16], OTHERS))
def test_the_law_holds_for_families_of_the_page(family: str) -> None:
    apart(family)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_functions_that_drop_in_eager_attention(family: str) -> None:
    assert apart(family, _attn_implementation="eager")


def apart(family: str, **features: Any) -> int:
    """How many masks are of the ranks' own data; all hold the law."""
    return check_law(masks(family, TWO, features))[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "llama"])
def test_tokens_that_are_spread_are_dropped_apart_too(family: str) -> None:
    replicated, apart = check_law(masks(family, TWO, {}, sequence_parallel=True))
    assert replicated <= 4 < apart or family == "llama"  # what is outside of the blocks


def test_stages_and_microbatches_follow_the_law() -> None:
    ranks = masks("gpt2", Mesh({"pp": 2, "tp": 2}), {}, num_microbatches=3)
    every = {tuple(kept.flatten().tolist()) for name, x, kept in ranks[0] + ranks[2] if x.ndim == 4}
    assert len(every) == 6  # three microbatches on two stages
    for stage in (ranks[:2], ranks[2:]):
        assert check_law(stage)[1]


def gradients(model: Any) -> dict[str, Tensor]:
    tpcore.random.manual_seed(5)
    output = model.train()(**families.batch_of(model), use_cache=False)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["", "tokens"])
@each_rank(tp=2)
def test_recomputation_draws_the_same_masks(
    ctx: tpcore.ParallelContext, reentrant: bool, options: dict[str, bool]
) -> None:
    model = tpcore.parallelize(dropping("gpt2", scale_attn_by_inverse_layer_idx=True), **options)
    want = gradients(model)
    recompute(model, use_reentrant=reentrant)
    model.get_input_embeddings().register_forward_hook(lambda m, a, y: y.requires_grad_())
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, want[name]), name


@each_rank(tp=2)
def test_a_model_without_dropout_draws_nothing(ctx: tpcore.ParallelContext) -> None:
    model = tpcore.parallelize(families.made(transformers.LlamaForCausalLM, families.config_of("llama")))
    state = torch.get_rng_state()
    model.train()(**families.batch_of(model)).loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
