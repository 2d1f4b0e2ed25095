"""Context parallelism on replicas: the losses of the whole model, and programs that are the same on all ranks."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from onreplicas import on_replicas
from test_xla_parallelize import SIZES, train
from tpcore_neuron.testing import Program, lower

import tpcore
from tpcore.layers.module import move_model_to_device
from tpcore.runtime.context import ParallelContext

transformers = pytest.importorskip("transformers")
WAYS = ("gather", "ulysses", "ring")


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": layers}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_the_whole_model(way: str) -> None:
    on_replicas(2, 1, partial(train, make=llama, context_parallel=way), cp=2)


def step(ctx: ParallelContext, way: str, layers: int, length: int = 64) -> Program:
    """Forward and backward of a model, lowered and not compiled."""
    warnings.simplefilter("ignore")
    model = tpcore.parallelize(llama(layers), context_parallel=way)
    move_model_to_device(model, ctx.device)
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
