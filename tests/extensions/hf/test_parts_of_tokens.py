"""Some of the tokens never pass for all in code that is not transformers' own: it sees all of them, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import hf
from helpers.tiers import tiers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama as llama

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

TWO, CP = Mesh({"tp": 2}), Mesh({"dp": 1, "cp": 2, "tp": 1})
IDS = torch.arange(16).reshape(2, 8) * 7 % 96
BLOCK, LAST, NORM, MLP = "model.layers.1", "model.layers.2", "model.layers.1.input_layernorm", "model.layers.1.mlp"
ROW, ATTENTION = f"{MLP}.down_proj", "model.layers.1.self_attn"


def mixed(x: Tensor) -> Tensor:
    """Of all tokens, whatever dims they are in."""
    tokens = x.flatten(1, -2)
    return (tokens - tokens.mean(1, keepdim=True) + 0.1 * tokens.roll(1, 1)).reshape(x.shape)


def _first(change: Callable[[Tensor], Tensor], y: Any) -> Any:
    return (change(y[0]), *y[1:]) if isinstance(y, tuple) else change(y)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _first(mixed, self.inner(*args, **kwargs))


def hook(m: Any, name: str) -> None:
    m.get_submodule(name).register_forward_hook(lambda module, args, y: _first(mixed, y))


def pre_hook(m: Any, name: str) -> None:
    m.get_submodule(name).register_forward_pre_hook(lambda module, args: (mixed(args[0]), *args[1:]))


def backward_hook(m: Any, name: str) -> None:
    m.get_submodule(name).register_full_backward_hook(lambda module, given, got: _first(mixed, given))


def forward(m: Any, name: str) -> None:
    inner = (module := m.get_submodule(name)).forward
    module.forward = lambda *args, **kwargs: _first(mixed, inner(*args, **kwargs))


def wrapped(m: Any, name: str) -> None:
    owner, _, last = name.rpartition(".")
    setattr(m.get_submodule(owner), last, Around(m.get_submodule(name)))


def of_class(m: Any, name: str) -> None:
    module = m.get_submodule(name)
    kind: Any = type(module)
    module.__class__ = type(
        "Mine",
        (kind,),
        {"__module__": __name__, "forward": lambda self, *a, **k: _first(mixed, kind.forward(self, *a, **k))},
    )


class Loop(llama.LlamaModel):
    """Works between the blocks."""

    def forward(self, input_ids: Any = None, **_: Any) -> Any:
        return transformers.modeling_outputs.BaseModelOutputWithPast(self.norm(looped(self, input_ids, 3)))


def looped(base: Any, ids: Tensor, blocks: int) -> Tensor:
    x, places = base.embed_tokens(ids), torch.arange(ids.shape[1])[None]
    turned = base.rotary_emb(x, places)
    for block in base.layers[:blocks]:
        x = mixed(block(x, attention_mask=None, position_embeddings=turned, position_ids=places))
    return x


class FirstBlocks(transformers.LlamaForCausalLM):
    """Leaves the loop early."""

    def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
        logits = self.lm_head(self.model.norm(looped(self.model, input_ids, 2)))
        loss = self.loss_function(logits, labels, vocab_size=96)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss, logits)


def loop(m: Any, name: str) -> None:
    m.model.__class__ = Loop


def loop_set(m: Any, name: str) -> None:
    m.model.forward = Loop.forward.__get__(m.model)


def outer_loop(m: Any, name: str) -> None:
    m.__class__ = FirstBlocks


def shortened(m: Any, name: str) -> None:
    m.model.layers = m.model.layers[:2]


def mixing_torch(m: Any, name: str) -> None:
    m.get_submodule(BLOCK).input_layernorm = nn.Softmax(1)


def all_of_class(m: Any, name: str) -> None:
    for i in range(3):
        of_class(m, f"model.layers.{i}.mlp")


Attach = Callable[[Any, str], None]
PLACES: dict[Attach, tuple[str, ...]] = {
    hook: (BLOCK, LAST, NORM, MLP, ATTENTION, ROW, "model.norm"),
    pre_hook: (BLOCK, NORM, MLP, "lm_head"),
    backward_hook: (BLOCK,),
    forward: (BLOCK, NORM),
    wrapped: (BLOCK, LAST, NORM, MLP, ROW),
    of_class: (BLOCK, LAST, NORM, MLP, ROW),
    loop: ("",),
    loop_set: ("",),
    outer_loop: ("",),
    shortened: ("",),
    mixing_torch: ("",),
}
CASES = [(attach, name) for attach, names in PLACES.items() for name in names]
LATE = [case for case in CASES if case[0] not in (outer_loop, mixing_torch)]
NOT_BEFORE = {(wrapped, ROW), (of_class, ROW), (shortened, "")}  # no plan knows it, no layer takes it, all is as before
EARLY = [case for case in CASES if case not in NOT_BEFORE]


def made() -> Any:
    config = {**hf.TINY, "vocab_size": 96, "num_hidden_layers": 3, "num_key_value_heads": 2}
    return hf.double(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)))


def result(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    grads = {n.replace(".inner", ""): p for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_whole(attach: Attach, name: str, when: str, prepare: Callable[[Any], None] = lambda model: None) -> None:
    def attached() -> Any:
        model = made()
        attach(model, name)
        prepare(model)
        return model

    loss, want = result(attached())

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = attached() if when == "before" else made()
        tpcore.parallelize(model, sequence_parallel=True)
        if when == "after":
            attach(model, name)
            prepare(model)
        got, grads = result(model)
        # norms and rotary positions of transformers compute in float32
        torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-6)
        assert grads.keys() == want.keys()
        for n, p in grads.items():
            torch.testing.assert_close(p.grad, hf.part(want[n].grad, p), rtol=1e-5, atol=1e-6, msg=n)

    run_ranks(TWO, rank)


def _ids(quick: list[tuple[Attach, str]], slow: list[tuple[Attach, str]] = []) -> Any:  # noqa: B006
    params = [
        pytest.param(*p.values, marks=p.marks, id=f"{p.values[0].__name__} {p.values[1]}") for p in tiers(quick, slow)
    ]
    return pytest.mark.parametrize(("attach", "name"), params)


@_ids(EARLY)
def test_what_was_there_sees_all_tokens(attach: Attach, name: str) -> None:
    assert_whole(attach, name, "before")


@_ids([case for case in LATE if case[1] in (ROW, NORM, "")], LATE)
def test_what_came_later_sees_all_tokens(attach: Attach, name: str) -> None:
    assert_whole(attach, name, "after")


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("attach", [loop, outer_loop])
def test_whether_checks_are_on_or_not(attach: Attach, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", check)
    assert_whole(attach, "", "before")


@pytest.mark.parametrize("reentrant", [False, True])
@_ids([(loop, ""), (outer_loop, ""), (hook, ROW), (of_class, MLP)])
def test_recomputed_too(attach: Attach, name: str, reentrant: bool) -> None:
    def prepare(model: Any) -> None:
        hf.recompute(model, use_reentrant=reentrant)
        model.enable_input_require_grads()

    assert_whole(attach, name, "before", prepare)


class Normed(TorchFunctionMode):
    """Of how many tokens the norms see: two of each block, and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rsqrt:
            self.tokens.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


def test_tokens_are_whole_where_they_must_be_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks without anything of another's keep their share of the tokens, and the line of log names the others."""

    def rank(ctx: tpcore.ParallelContext) -> list[int]:
        model = made()
        of_class(model, MLP)
        tpcore.parallelize(model, sequence_parallel=True)
        with Normed() as normed:
            model(input_ids=IDS, use_cache=False)
        return normed.tokens

    with caplog.at_level("INFO"):
        assert run_ranks(TWO, rank)[0] == [4, 4, 8, 8, 4, 4, 8]
    assert "tokens stay whole around what may mix them: model.layers.*.mlp (Mine)" in caplog.text


def test_what_is_called_alone_has_all_tokens() -> None:
    """After a forward, and so after blocks of which each rank had some tokens: a weight's gradient counts them once."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = made().get_submodule(MLP)
    want = plain(x)
    want.square().sum().backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(), sequence_parallel=True)
        for _ in range(2):
            model.zero_grad()
            mlp = model.get_submodule(MLP)
            y = mlp(x)
            torch.testing.assert_close(y, want)
            y.square().sum().backward()
            for name in ("up_proj", "down_proj"):
                layer = mlp.get_submodule(name)
                part = layer.part_of("weight", plain.get_submodule(name).weight.grad)
                torch.testing.assert_close(layer.weight.grad, part)
            result(model)

    run_ranks(TWO, rank)


def test_nothing_to_share_is_refused() -> None:
    model = made()
    all_of_class(model, "")
    words = r"in every block what is whole and no norm.*: model.layers.\*.mlp \(Mine\): leave sequence_parallel out"

    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match=words):
            tpcore.parallelize(copy.deepcopy(model), sequence_parallel=True)

    run_ranks(TWO, rank)


OUTSIDE = {"model.norm"}


@_ids([(attach, names[0]) for attach, names in PLACES.items() if attach != shortened], EARLY)
def test_over_cp_what_was_there_is_refused(attach: Attach, name: str) -> None:
    refused_over_cp(attach, name, "before")


@_ids([(hook, ROW), (wrapped, NORM), (of_class, ROW), (loop, "")], [case for case in LATE if case[0] != shortened])
def test_over_cp_what_came_later_is_refused(attach: Attach, name: str) -> None:
    refused_over_cp(attach, name, "after")


def refused_over_cp(attach: Attach, name: str, when: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made()
        if when == "before":
            attach(model, name)
            if name in OUTSIDE:
                tpcore.parallelize(model)
            else:
                with pytest.raises(ValueError, match="would see one rank's tokens"):
                    tpcore.parallelize(model)
            return
        tpcore.parallelize(model)
        attach(model, name)
        if name in OUTSIDE:
            result(model)
            return
        with pytest.raises(ValueError, match="would see one rank's tokens"):
            result(model)

    run_ranks(CP, rank)


def test_over_cp_hooks_of_the_model_see_whole_sequences() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model, shapes = made(), list[Any]()

        def hooks() -> None:
            model.register_forward_pre_hook(
                lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
            )
            model.register_forward_hook(lambda module, args, y: shapes.append(y.logits.shape[:2]))

        hooks()
        tpcore.parallelize(model)
        hooks()
        result(model)
        assert shapes == [(2, 8)] * 4

    run_ranks(CP, rank)
