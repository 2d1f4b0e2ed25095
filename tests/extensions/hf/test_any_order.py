"""Forwards, evaluations, generations, recomputations and means in any order give the gradients of each by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers import hf
from helpers.counting import counted
from helpers.hf import GPT2, double, llama, mixtral, part, text
from helpers.tiers import SLOW
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_peft import config, peft, warm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks
from tpcore_hf.peft import get_peft_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ROUNDS = 1e-6  # norms and routers of transformers compute in float32
Program = list[tuple[str, int]]


def gpt2() -> nn.Module:
    return hf.transformers.GPT2LMHeadModel(hf.transformers.GPT2Config(**GPT2))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "lora": llama}
STAGES = {"pp": 2, "dp": 1, "tp": 2}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tokens": ({"dp": 1, "tp": 2}, {"sequence_parallel": True}),
    "stages": (STAGES, {"num_microbatches": 2, "sequence_parallel": True}),
    "context": ({"dp": 1, "cp": 2, "tp": 2}, {"sequence_parallel": True}),
}
RECOMPUTED = {"": None, "reentrant": True, "graph": False}


def made(name: str, recomputed: bool | None = None, **options: Any) -> Any:
    model = double(MODELS[name])
    if options:
        tpcore.parallelize(model, **options)
    if name == "lora":
        model = (get_peft_model if options else peft.get_peft_model)(model, config())
        warm(model)
        model.enable_input_require_grads()
    if recomputed is not None:
        hf.recompute(model, use_reentrant=recomputed)
    return model.train()


def batch(length: int) -> dict[str, Tensor]:
    """Of four rows, for microbatches and for ranks of ep."""
    one = text(length=length)
    return {name: torch.cat([t, t[:1].roll(1, 1)]) for name, t in one.items()}


@cache
def alone(name: str, length: int) -> dict[str, Tensor]:
    """The gradients of one forward and its backward of the whole model."""
    whole = made(name)
    whole(**batch(length)).loss.backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def played(model: Any, program: Program) -> list[int]:
    """Do what ``program`` says; the lengths whose losses went backward."""
    losses: list[tuple[int, Tensor]] = []
    done = []
    for what, n in [*program, ("all", 0)]:
        if what == "loss":
            losses.append((n, model(**batch(n)).loss))
        elif what == "backward" and losses:
            length, loss = losses.pop(n % len(losses))
            loss.backward()
            done.append(length)
        elif what == "all" and losses:
            torch.stack([loss for _, loss in losses]).sum().backward()
            done += [length for length, _ in losses]
            losses.clear()
        elif what in ("eval", "generate"):
            model.eval()
            with torch.no_grad():
                model(**batch(n)) if what == "eval" else model.generate(batch(n)["input_ids"], max_new_tokens=2)
            model.train()
    return done


def assert_sums(model: Any, name: str, done: list[int]) -> None:
    for key, p in model.named_parameters():
        want = sum(alone(name, length)[key] for length in done) if p.requires_grad and done else None
        if isinstance(want, Tensor):
            torch.testing.assert_close(
                p.grad, part(want, p), rtol=ROUNDS, atol=ROUNDS, msg=lambda m, key=key: f"{key} {m}"
            )


def programs(mesh: str) -> st.SearchStrategy[Program]:
    lengths = st.sampled_from((4, 6, 8) if mesh == "context" else (5, 6, 7, 8))
    steps = [st.tuples(st.just("loss"), lengths)] * 2 + [st.tuples(st.just("eval"), lengths)]
    steps += [st.tuples(st.just("generate"), lengths)] if mesh == "tokens" else []
    steps += [st.tuples(st.just("backward"), st.integers(0, 3)), st.just(("all", 0))]
    return st.lists(st.one_of(steps), min_size=3, max_size=8)


def known(odd: int) -> list[Program]:
    """What was wrong once: ``odd`` tokens stay whole."""
    return [
        [("loss", 8), ("eval", odd), ("loss", odd), ("all", 0)],
        [("loss", odd), ("loss", 8), ("eval", 8), ("backward", 0)],
    ]


CASES = [
    ("llama", "tokens", "reentrant"),
    ("gpt2", "stages", ""),
    ("mixtral", "tokens", "graph"),
    ("lora", "tokens", "reentrant"),
    ("llama", "context", "graph"),
]
ALL = [
    pytest.param(name, mesh, how, marks=() if (name, mesh, how) in CASES else SLOW)
    for name in MODELS
    for mesh in MESHES
    for how in RECOMPUTED
    if not (mesh == "stages" and (how or name == "lora"))  # stages recompute, and take adapters before
]


@pytest.mark.parametrize(("name", "mesh", "how"), ALL)
def test_any_order_gives_the_gradients_of_each_by_itself(name: str, mesh: str, how: str) -> None:
    axes, options = MESHES[mesh]
    few = (name, mesh, how) in CASES

    # without shrinking: an example takes a second
    @settings(max_examples=3, deadline=None, derandomize=few, phases=[Phase.generate])
    @given(st.lists(programs(mesh), min_size=1, max_size=3))
    def check(several: list[Program]) -> None:
        def rank(ctx: tpcore.ParallelContext) -> None:
            model = made(name, RECOMPUTED[how], **options)
            for program in [*known(6 if mesh == "context" else 7), *several]:
                model.zero_grad()
                done = played(model, program)
                if ctx.data.size > 1:
                    tpcore.reduce_gradients(model)
                assert_sums(model, name, done)

        run_ranks(Mesh(axes), rank)

    check()


class Recomputed(nn.Module):
    """A part of a block that a user recomputes by itself."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        run = partial(checkpoint, self.inner, use_reentrant=self.reentrant) if torch.is_grad_enabled() else self.inner
        return run(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_part_of_a_block_is_recomputed(reentrant: bool) -> None:
    program: Program = [("loss", 8), ("loss", 6), ("eval", 7), ("all", 0), ("loss", 7)]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made("llama", sequence_parallel=True)
        names = [name for name, _ in model.named_parameters()]
        for block in model.model.layers:
            block.mlp = Recomputed(block.mlp, reentrant)
        done = played(model, program)
        for name, p in zip(names, model.parameters(), strict=True):
            want = sum(alone("llama", length)[name] for length in done)
            torch.testing.assert_close(p.grad, part(want, p), rtol=ROUNDS, atol=ROUNDS, msg=name)

    run_ranks(Mesh({"tp": 2}), rank)


def test_hidden_states_are_whole() -> None:
    want = made("llama").eval()(**batch(8), output_hidden_states=True).hidden_states

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made("llama", sequence_parallel=True)
        for _ in range(2):
            got = model.eval()(**batch(8), output_hidden_states=True).hidden_states
            torch.testing.assert_close(got, want, rtol=ROUNDS, atol=ROUNDS)
            model(**batch(8))
        hf.recompute(model.train())
        got = model(**batch(8), output_hidden_states=True).hidden_states
        torch.testing.assert_close(got, want, rtol=ROUNDS, atol=ROUNDS)
        assert_sums(model, "llama", played(model, [("loss", 8)]))

    run_ranks(Mesh({"tp": 2}), rank)


def test_after_whole_hidden_states_tokens_are_shared_again() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made("llama", sequence_parallel=True).eval()
        for options in ({}, {"output_hidden_states": True}, {}):
            ctx.comm("tp").all_reduce(torch.ones(7))
            model(**batch(8), **options)

    _, (calls, _) = counted(Mesh({"tp": 2}), rank)
    first, held, last = (i for i, call in enumerate(calls) if call.shape == (7,))
    assert calls[first:held] == calls[last:] != calls[held:last]


@pytest.mark.skipif(not hf.SPREADS, reason="experts of this transformers are whole, and may mix tokens: refused")
@pytest.mark.parametrize("length", [13, 14])
def test_what_is_added_between_blocks_meets_whole_tokens(length: int) -> None:
    ids = torch.arange(3, 3 + length)[None]
    ids[0, 2], ids[0, 3:7] = 96, 98
    pixels = torch.randn(16, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    image = {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 98).long(),
    }
    hf.assert_equals_whole(
        hf.vision, (2,), {"input_ids": ids, "labels": ids, **image}, tolerance=ROUNDS, sequence_parallel=True
    )


MEANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2, "tp": 1}, {}),
    "ep": ({"dp": 1, "ep": 2, "tp": 1}, {}),
    "dp x ep": ({"dp": 2, "ep": 2, "tp": 1}, {}),
    "ep x tp, tokens": ({"dp": 1, "ep": 2, "tp": 2}, {"sequence_parallel": True}),
    "ep x cp": ({"dp": 1, "ep": 2, "cp": 2, "tp": 1}, {}),
    "pp x ep": ({"pp": 2, "dp": 1, "ep": 2, "tp": 1}, {"num_microbatches": 1}),
}


@pytest.mark.parametrize("zero1", [False, True], ids=["", "zero1"])
@pytest.mark.parametrize("mesh", MEANS)
def test_a_mean_of_means_is_the_mean(mesh: str, zero1: bool) -> None:
    """Taken in each step of an accumulation, again, by clipping, beside backward, and by the optimizer's step."""
    axes, options = MEANS[mesh]
    ranks = axes["dp"] * axes.get("ep", 1)
    data = [[{k: t.chunk(ranks)[i] for k, t in batch(n).items()} for i in range(ranks)] for n in (8, 4)]
    whole = made("mixtral")
    torch.stack([whole(**part).loss for parts in data for part in parts]).sum().div(ranks).backward()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model, at = made("mixtral", **(options or {"plan": {}})), ctx.index(ctx.batch)
        sgd = torch.optim.SGD
        optimizer: Any = (
            tpcore.Zero1(sgd, model.named_parameters(), lr=1.0) if zero1 else sgd(model.parameters(), lr=1.0)
        )
        first, last = (parts[at] for parts in data)
        model(**first).loss.backward()
        tpcore.reduce_gradients(model)
        with tpcore.overlap_grad_reduce(optimizer):
            model(**last).loss.backward()
        tpcore.reduce_gradients(model)
        tpcore.reduce_gradients(model)
        tpcore.clip_grad_norm(model, 1e9)
        tpcore.optimizer_step(optimizer, max_norm=1e9)
        named = dict(whole.named_parameters())
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, part(named[name], p), rtol=ROUNDS, atol=ROUNDS, msg=name)

    run_ranks(Mesh(axes), rank)
