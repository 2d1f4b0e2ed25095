"""Models of transformers on replicas: the losses of the whole model, by one program that all ranks run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from onreplicas import on_replicas

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_neuron.testing import Program, lower, programs

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
STEPS = 4


def make(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config)
    if family == "bert":
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **dropouts))
    if family == "t5":
        sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        )
    assert family == "mixtral"
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def losses(model: Any, optimizer: Any, update: Any, device: Any) -> list[float]:
    ids = torch.randint(3, 99, (4, 8), generator=torch.Generator().manual_seed(1)).to(device)
    options = {} if model.config.model_type == "bert" else {"use_cache": False}
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, **options).loss
        loss.backward()
        update(model, optimizer)
        found.append(loss.detach())
    return [loss.item() for loss in found]


def clip_and_step(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def train(ctx: ParallelContext, make: Callable[[], Any], **ways: Any) -> None:
    warnings.simplefilter("ignore")
    whole = make().train()
    want = losses(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), clip_and_step, "cpu")
    model = tpcore.parallelize(make(), **ways).train()
    tpcore.layers.move_model_to_device(model, ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = len(programs())
    got = losses(model, optimizer, lambda _, o: tpcore.optimizer_step(o, max_norm=0.5), ctx.device)
    assert got == pytest.approx(want, abs=1e-5)  # float32, four steps
    ran = programs()[before:]
    assert sum(bool(p.compiled) for p in ran) <= 2, "the first step, and the one with the optimizer's state"


@pytest.mark.parametrize(("family", "sequence_parallel"), [("llama", True), ("bert", False), ("t5", True)])
def test_trains_as_the_whole_model(family: str, sequence_parallel: bool) -> None:
    on_replicas(2, 2, partial(train, make=partial(make, family), sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("ways", [{}, {"expert_parallel": True}], ids=["features", "experts"])
def test_experts_are_one_program_whichever_are_chosen(ways: dict[str, bool]) -> None:
    on_replicas(2, 2, partial(train, make=partial(make, "mixtral"), **ways))


def steps_of_experts(ctx: ParallelContext, ways: dict[str, Any]) -> list[float]:
    """Losses of four steps, and the parts of the choices that each layer dropped."""
    model = tpcore.parallelize(make("mixtral"), **ways).train()
    tpcore.layers.move_model_to_device(model, ctx.device)
    load, optimizer = tpcore_hf.ExpertLoad(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(3, 99, (4, 8), generator=torch.Generator().manual_seed(1))
    mine, found = ids.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss
        loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=0.5)
        found.append(loss.detach())
    return [*(loss.item() for loss in found), *(one.dropped for one in load.read().values())]


def on_the_device(ctx: ParallelContext, ways: dict[str, Any]) -> list[float]:
    warnings.simplefilter("ignore")
    before = len(programs())
    found = steps_of_experts(ctx, ways)
    assert sum(bool(p.compiled) for p in programs()[before:]) <= 4  # two steps, and the counts of two layers
    return found


@pytest.mark.parametrize(
    ("tp", "ep", "ways"),
    [(2, 1, {"capacity_factor": 0.75}), (1, 2, {"capacity_factor": 0.75, "dispatch": "all_to_all"})],
)
def test_a_capacity_drops_what_it_does_on_the_cpu(tp: int, ep: int, ways: dict[str, Any]) -> None:
    """Compiled once, with static shapes: experts of few seats, and tokens in the seats of an all-to-all."""
    want = run_ranks(Mesh({"dp": 1, "ep": ep, "tp": tp}), lambda ctx: steps_of_experts(ctx, ways))
    got = on_replicas(2, tp, on_the_device, ways, ep=ep)
    for mine, of_threads in zip(got, want, strict=True):
        assert mine == pytest.approx(of_threads, abs=1e-5)  # float32, four steps
    assert all(dropped > 0 for dropped in want[0][STEPS:])


# -- context parallelism -----------------------------------------------------------------------------------
WAYS = ("gather", "ulysses", "ring")


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": layers}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def with_sinks() -> Any:
    """Its second layer with a window, too."""
    torch.manual_seed(0)
    config = transformers.GraniteSWAConfig(**SIZES, num_key_value_heads=2, sliding_window=3)
    return transformers.GraniteSWAForCausalLM(config)


@pytest.mark.parametrize("make", [llama, with_sinks])
@pytest.mark.parametrize("way", WAYS)
def test_trains_with_tokens_of_other_ranks(way: str, make: Callable[[], Any]) -> None:
    on_replicas(2, 1, partial(train, make=make, context_parallel=way), cp=2)


def step(ctx: ParallelContext, way: str, layers: int, length: int = 64) -> Program:
    """Forward and backward of a model, lowered and not compiled."""
    warnings.simplefilter("ignore")
    model = tpcore.parallelize(llama(layers), context_parallel=way)
    tpcore.layers.move_model_to_device(model, ctx.device)
    ids = torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(1)).to(ctx.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return lower(loss.detach(), *(p.grad for p in model.parameters()))


@pytest.mark.slow
def test_the_size_of_a_program() -> None:
    """Of a layer: about as many operations at every degree, but for the ring, which adds as many for each step."""
    size: dict[str, list[int]] = {way: [] for way in WAYS}
    for way in WAYS:
        for cp in (2, 4, 8):
            of = [on_replicas(cp, 1, step, way, layers, cp=cp) for layers in (1, 2)]
            for every in of:
                assert {p.digest for p in every} == {every[0].digest}
            size[way].append(of[1][0].operations - of[0][0].operations)
    for way in ("gather", "ulysses"):
        assert max(size[way]) < 1.1 * min(size[way])
    two, four, eight = size["ring"]
    assert eight - four == 2 * (four - two) > 0, "two halves of a block for each rank"
