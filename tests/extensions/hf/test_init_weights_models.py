"""Initial values of one's own: the shards of what the function does to the unsharded model, at every degree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import hf
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)),
}


def by_kind(module: nn.Module) -> None:
    """By the kind of module, by what it has, and by what its values were."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02 / module.in_features**0.5)
        if module.bias is not None:
            module.bias.data.uniform_(-0.1, 0.1)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0.0, 0.02)
        module.weight.data[7] = 0.0
    elif type(module).__name__ == "Conv1D":
        nn.init.orthogonal_(module.weight)
        module.weight.data[:, : module.nf // 2] *= 0.5  # type: ignore[operator, index]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_values_are_those_of_apply(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    whole = copy.deepcopy(model)
    torch.manual_seed(5)
    whole.apply(by_kind)
    after = torch.rand(3)

    def rank(ctx: tpcore.ParallelContext) -> None:
        mine = tpcore.parallelize(copy.deepcopy(model))
        tpcore.random.manual_seed(5)
        assert tpcore.init_weights(mine, by_kind) is mine
        assert torch.equal(torch.rand(3), after)
        want: dict[str, Tensor] = dict(whole.named_parameters())
        for key, p in mine.named_parameters():
            assert torch.equal(p, hf.part(want[key].detach(), p)), key

    run_ranks(Mesh(mesh), rank)


@pytest.mark.parametrize("name", ["llama, tied", "mixtral"])
def test_a_model_on_meta_gets_transformers_own_values(name: str) -> None:
    def made(shard: Callable[[Any], Any]) -> Any:
        with torch.device("meta"):
            model = shard(MODELS[name]())
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        model.init_weights()
        return model

    whole = made(lambda model: model)

    def rank(ctx: tpcore.ParallelContext) -> None:
        mine = made(tpcore.parallelize)
        for key, p in whole.named_parameters():
            assert torch.equal(mine.get_parameter(key), hf.part(p.detach(), mine.get_parameter(key))), key

    run_ranks(Mesh({"tp": 2}), rank)


def by_place(model: nn.Module) -> Callable[[nn.Module], None]:
    """By what a script knows of the modules and Parameters that the model has: their names, and what is around them."""
    names, weights = {m: name for name, m in model.named_modules()}, {p: name for name, p in model.named_parameters()}
    around = {id(child): type(m).__name__ for m in model.modules() for child in m.children()}

    def fill(module: nn.Module) -> None:
        module.visited = names[module]  # type: ignore[assignment]
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, len(weights[p]), len(around[id(module)]))

    return fill


def test_a_function_meets_the_modules_and_parameters_of_the_model() -> None:
    model = MODELS["mixtral"]()
    whole = copy.deepcopy(model)
    torch.manual_seed(5)
    whole.apply(by_place(whole))

    def rank(ctx: tpcore.ParallelContext) -> None:
        mine = tpcore.parallelize(copy.deepcopy(model))
        before = [(m, type(m), id(p), p.shape) for m in mine.modules() for p in m.parameters(recurse=False)]
        tpcore.random.manual_seed(5)
        tpcore.init_weights(mine, by_place(mine))
        for key, p in mine.named_parameters():
            assert torch.equal(p, hf.part(whole.get_parameter(key).detach(), p)), key
        with pytest.raises(ValueError, match="calls a Linear that is sharded, and whose hooks take parts"):
            tpcore.init_weights(mine, lambda m: m(torch.ones(1, 32)) if isinstance(m, nn.Linear) else None)
        assert [(m, type(m), id(p), p.shape) for m in mine.modules() for p in m.parameters(recurse=False)] == before
        assert all(m.visited == name for name, m in mine.named_modules())

    run_ranks(Mesh({"tp": 2}), rank)


def from_outside(module: nn.Module) -> None:
    """As GPT-2's own function once did: a module fills what is inside of it."""
    for name, p in module.named_parameters():
        if name in ("c_proj.weight", "attn.c_attn.bias"):
            p.data.normal_(0, 0.02).mul_(2)


def children(module: nn.Module) -> None:
    """By the kinds, the sizes and the values of what is inside, and with Parameters of its own."""
    for child in module.children() if hasattr(module, "up_proj") else ():
        if isinstance(child, nn.Linear):
            nn.init.kaiming_normal_(child.weight.data)
            child.weight.data.div_(len(child.weight) * child.weight.size(1) + child.weight.data.numel())
            child.weight.data.copy_(child.weight / child.weight.norm())
    if hasattr(module, "up_proj"):
        module.up_proj.weight = nn.Parameter(torch.randn(module.down_proj.weight.shape[::-1]))  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["init_weights", "apply"])
@pytest.mark.parametrize(("name", "from_outside"), [("gpt2", from_outside), ("llama, tied", children)])
def test_what_a_module_fills_inside_of_it(name: str, from_outside: Callable[[Any], None], way: str) -> None:
    model = MODELS[name]()
    whole = copy.deepcopy(model)
    torch.manual_seed(5)
    whole.apply(from_outside)

    def rank(ctx: tpcore.ParallelContext) -> None:
        mine = tpcore.parallelize(copy.deepcopy(model))
        tpcore.random.manual_seed(5)
        if way == "apply":
            vars(mine)["_init_weights"].keywords["fn"] = from_outside
            mine.apply(mine._init_weights)
        else:
            tpcore.init_weights(mine, from_outside)
        want: dict[str, Tensor] = dict(whole.named_parameters())
        for key, p in mine.named_parameters():
            assert torch.equal(p, hf.part(want[key].detach(), p)), key
        inside, leaf = ("h.0.attn.c_attn", "bias") if name == "gpt2" else ("layers.0.mlp.up_proj", "weight")
        around, _, last = inside.rpartition(".")
        layer, module = mine.base_model.get_submodule(inside), mine.base_model.get_submodule(around)
        kind, p = type(layer), layer.get_parameter(leaf)
        with pytest.raises(ValueError, match=rf"reads \[.*\] of {last}.{leaf}, of which each rank has a part"):
            tpcore.init_weights(mine, lambda m: getattr(m, last).get_parameter(leaf)[1:].shape if m is module else None)
        with pytest.raises(ValueError, match=rf"fills.* of {last}.{leaf}, of which each rank has a part"):
            tpcore.init_weights(
                mine, lambda m: getattr(m, last).get_parameter(leaf).data[:3].zero_() if m is module else None
            )
        assert (type(layer), layer.get_parameter(leaf)) == (kind, p)

    run_ranks(Mesh({"tp": 2}), rank)
