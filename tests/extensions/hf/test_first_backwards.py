"""Whole parameters in modules of one's own: their gradients are those of all tokens, or the first backward refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers import hf
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

TWO = Mesh({"tp": 2})
IDS = torch.arange(16).reshape(2, 8) * 7 % 96


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _early(mlp: Any, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    late = mlp.late
    return plain(x) + late


INSIDE: dict[str, Callable[[Any, Callable[[Tensor], Tensor], Tensor], Any]] = {
    "added": lambda mlp, plain, x: plain(x) + mlp.late,
    "returned": lambda mlp, plain, x: (plain(x), mlp.late),
    "read outside": lambda mlp, plain, x: plain(x),
    "a child": lambda mlp, plain, x: mlp.scale(plain(x)),
    "twice": lambda mlp, plain, x: plain(x * mlp.late) * mlp.late,
    "early": _early,
    "derived": lambda mlp, plain, x: mlp.late.exp() + plain(x),
    "of features": lambda mlp, plain, x: mlp.down_proj(mlp.up_proj(x) * mlp.temperature),
}
REFUSED = {"of features"}


class Mine(LlamaMLP):
    def __init__(self, config: Any, kind: str) -> None:
        super().__init__(config)
        self.kind, self.scale, self.late = kind, Scale(), nn.Parameter(torch.linspace(-1, 1, 32))
        if kind == "of features":
            self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Any:
        return INSIDE[self.kind](self, super().forward, x)


class Around(nn.Module):
    """Adds what the module inside has, or returns."""

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        self.mlp = Mine(config, kind)

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = self.mlp(hidden_states)
        if isinstance(y, tuple):
            return y[0] + y[1]
        return y + self.mlp.late + self.mlp.scale.weight.exp() if self.mlp.kind == "read outside" else y


def model(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    made.model.layers[0].mlp = Around(made.config, kind)  # the other block can do with some of the tokens
    return made.double()


PLAN = {f"model.layers.*.mlp.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
PLAN |= {"model.layers.*.mlp.mlp.down_proj": "rowwise"}
OF_FEATURES = PLAN | {"model.layers.*.mlp.mlp.temperature": "replicate"}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["tokens", "whole"])
@pytest.mark.parametrize("kind", INSIDE)
def test_a_parameter_of_ones_own(kind: str, sequence_parallel: bool) -> None:
    whole = model(kind)
    options: Any = {"plan": OF_FEATURES if kind == "of features" else PLAN, "sequence_parallel": sequence_parallel}
    plain = copy.deepcopy(whole)
    plain(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    want = {name: p.grad for name, p in plain.named_parameters()}

    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(copy.deepcopy(whole), **options)
        loss = part(input_ids=IDS, labels=IDS, use_cache=False).loss
        if kind in REFUSED:
            with pytest.raises(ValueError, match="differs between them: ranks have other batches"):
                loss.backward()
            return
        loss.backward()
        for name, p in part.named_parameters():
            if (expected := want[name]) is not None:
                # norms and rotary positions of transformers compute in float32
                torch.testing.assert_close(p.grad, hf.part(expected, p), rtol=1e-5, atol=1e-6, msg=name)
        block = part.model.layers[0]
        assert block.mlp.mlp.late.is_leaf, "out of a forward it is the parameter itself"

    run_ranks(TWO, rank)


def test_a_part_recomputed_by_itself_sums_too() -> None:
    whole = model("added")
    plain = copy.deepcopy(whole)
    plain(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(copy.deepcopy(whole), plan=PLAN, sequence_parallel=True)
        layer = part.model.layers[0]
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
        part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        late = layer.mlp.mlp.late
        assert late.is_leaf
        torch.testing.assert_close(late.grad, plain.model.layers[0].mlp.mlp.late.grad, rtol=1e-5, atol=1e-6)

    run_ranks(TWO, rank)


def _accumulated(part: Any, loss: Callable[[], Tensor]) -> None:
    for _ in range(3):
        (loss() / 3).backward()


def _of_one_part(part: Any, loss: Callable[[], Tensor]) -> None:
    part.model.norm(torch.ones(2, 2, 32, dtype=torch.float64)).sum().backward()
    loss().backward()


def _thawed(part: Any, loss: Callable[[], Tensor]) -> None:
    part.requires_grad_(False)
    part.model.layers[1].requires_grad_(True)
    loss().backward()
    part.requires_grad_(True)
    loss().backward()


def _after_grad(part: Any, loss: Callable[[], Tensor]) -> None:
    torch.autograd.grad(loss(), [*part.parameters()], allow_unused=True)
    loss().backward()


def _kept(part: Any, loss: Callable[[], Tensor]) -> None:
    (kept := loss()).backward(retain_graph=True)
    kept.backward()


WAYS: dict[str, Callable[[Any, Callable[[], Tensor]], Any]] = {
    "accumulated": _accumulated,
    "of one part": _of_one_part,
    "thawed": _thawed,
    "after autograd.grad": _after_grad,
    "kept": _kept,
    "of some inputs": lambda part, loss: (loss().backward(inputs=[part.model.norm.weight]), loss().backward()),
    "two losses": lambda part, loss: (loss() + loss()).backward(),
    "recomputed": lambda part, loss: (hf.recompute(part, use_reentrant=False), loss().backward()),
    "recomputed inside": lambda part, loss: (
        hf.recompute(part, use_reentrant=True),
        part.enable_input_require_grads(),
        loss().backward(),
    ),
}


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_the_first_backwards_are(way: str, wrong: bool) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("added"), plan=PLAN).train()
        norm = part.model.layers[0].input_layernorm
        norm.register_forward_hook(lambda m, a, y: y * (1 + ctx.rank / 2) if wrong else None)
        step = partial(WAYS[way], part, lambda: part(input_ids=IDS, labels=IDS, use_cache=False).loss)
        if not wrong:
            step()
            return
        with pytest.raises(ValueError, match=r"gradient of model.layers.\*.input_layernorm.weight, whole on each tp"):
            step()

    run_ranks(TWO, rank)


BATCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "input_ids": lambda at: {"input_ids": (IDS + at) % 96, "labels": IDS},
    "labels": lambda at: {"input_ids": IDS, "labels": (IDS + at) % 96},
    "inputs_embeds": lambda at: {"inputs_embeds": torch.linspace(at - 1, 1, 512).view(2, 8, 32).double()},
    "attention_mask": lambda at: {"input_ids": IDS, "attention_mask": torch.ones(2, 8).tril(5 - at).long()},
    "input_ids, of other lengths": lambda at: {"input_ids": IDS[:, at:]},
}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["tokens", "whole"])
@pytest.mark.parametrize("name", BATCHES)
def test_other_batches_on_the_ranks_of_a_tp_group_are_refused(name: str, sequence_parallel: bool) -> None:
    """As a sampler deals them that takes the number of a process in the world."""

    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("added"), plan=PLAN, sequence_parallel=sequence_parallel)
        argument = name.partition(",")[0]
        first, other = (re.escape(str([*BATCHES[name](at)[argument].shape])) for at in (0, 1))
        said = rf"ranks 0 and 1 of one tp group differ in {argument}: .*ctx.batch.size.*\({first} of .*; {other} of "
        for train in (True, False):
            with torch.set_grad_enabled(train), pytest.raises(ValueError, match=said):
                part.train(train)(**BATCHES[name](ctx.coord("tp")), use_cache=False)
        with pytest.raises(ValueError, match=r"of one tp group have input_ids, labels and input_ids: "):
            part(input_ids=IDS, **({} if ctx.coord("tp") else {"labels": IDS}))
        batch = IDS + ctx.coord("dp")  # the ranks of dp have other batches
        part(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        part(inputs_embeds=torch.full((2, 8, 32), 1.0 + ctx.rank).double().requires_grad_())  # of another stage

    run_ranks(Mesh({"dp": 2, "tp": 2}), rank)


def test_batches_are_compared_in_the_first_forwards_or_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("added"), plan=PLAN)
        for _ in range(3):
            part(input_ids=IDS)
        part(input_ids=(IDS + ctx.rank) % 96)
        with (
            torch.no_grad(),
            nullcontext() if check == "off" else pytest.raises(ValueError, match="differ in input_ids"),
        ):
            part(input_ids=(IDS + ctx.rank) % 96)

    for check in ("off", "warmup", "always"):
        monkeypatch.setenv("TPCORE_CHECK", check)
        with pytest.raises(ValueError, match="differ in input_ids") if check == "always" else nullcontext():
            run_ranks(TWO, rank)


@pytest.mark.parametrize("name", ["mlp.mlp.up_proj", "self_attn.k_proj"])
def test_parts_filled_as_if_they_were_whole_are_found(name: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("added"), plan=PLAN)
        torch.manual_seed(0)
        part.model.layers[0].get_submodule(name).weight.data.normal_()
        for backwards in range(2):  # the error comes once, and what was learned before it stays
            loss = part(input_ids=IDS, labels=IDS, use_cache=False).loss
            if backwards == 0:
                with pytest.raises(ValueError, match=f"parts of model.layers.*{name}.weight have the same values"):
                    loss.backward()
            else:
                loss.backward()

    run_ranks(TWO, rank)


def _parameters(part: Any) -> list[Any]:
    return [p for p in part.parameters() if p.grad is not None]


def _by_hand(part: Any, norm: Callable[[Tensor], Tensor]) -> None:
    """What each rank takes for the norm of all gradients."""
    total = torch.stack([norm(p.grad) for p in _parameters(part)]).norm()
    torch._foreach_mul_([p.grad for p in _parameters(part)], (1 / total).item())


def _perturbed(part: Any, norm: Callable[[Tensor], Tensor]) -> None:
    """As sharpness-aware minimization does, before a second backward."""
    total = torch.stack([norm(p.grad) for p in _parameters(part)]).norm()
    for p in _parameters(part):
        p.data.add_(0.05 * p.grad / total)
        p.grad = None
    part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


BETWEEN: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "norm": (lambda part: _by_hand(part, Tensor.norm), "steps by gradients"),
    "of data": (lambda part: _by_hand(part, lambda g: torch.linalg.vector_norm(g.data.float())), "steps by gradients"),
    "squares": (lambda part: _by_hand(part, lambda g: g.detach().square().sum().sqrt()), "steps by gradients"),
    "largest": (lambda part: _by_hand(part, lambda g: g.abs().max()), "steps by gradients"),
    "values": (lambda part: _by_hand(part, lambda g: g.norm() * 0 + part.lm_head.weight.sum()), "steps by gradients"),
    "perturbed": (lambda part: _perturbed(part, Tensor.norm), r"model.layers.\*.input_layernorm.* has other values"),
    "clipped": (lambda part: tpcore.clip_grad_norm(part, 0.1), None),
    "averaged": (lambda part: [p.grad.div_(3) for p in _parameters(part)], None),
    "by value": (lambda part: nn.utils.clip_grad_value_(part.parameters(), 1e-3), None),
    "infinite": (lambda part: [p.grad.mul_(float("inf")) for p in _parameters(part)], None),
}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, partial(tpcore.Zero1, torch.optim.AdamW)])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_a_number_of_one_ranks_parts_scales_no_step(name: str, optimizer: Any) -> None:
    """Whatever the number was taken by, and though a warm-up begins with a rate of 0. Nothing has stepped by then."""

    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("added"), plan=PLAN)
        between, refused = BETWEEN[name]
        stepped = optimizer(part.parameters(), lr=0.0)
        for _ in range(3):
            part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            if refused is None:
                between(part)
                stepped.step()
            else:
                with pytest.raises(ValueError, match=f"{refused}.*tpcore.clip_grad_norm"):
                    (between(part), stepped.step())
                break
            stepped.zero_grad()
        assert len(ctx.before_steps) == (refused is not None)

    run_ranks(TWO, rank)


def test_ranks_with_models_of_other_seeds_are_told() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        whole = model("added")
        nn.init.normal_(whole.model.norm.weight, generator=torch.Generator().manual_seed(ctx.rank))
        part = tpcore.parallelize(whole, plan=PLAN)
        with pytest.raises(ValueError, match=r"model\.norm\.weight, whole on each tp rank, has other values"):
            part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()

    run_ranks(TWO, rank)


def _copies(part: Any) -> None:
    for name, p in part.named_parameters():
        if "up_proj" in name:
            p.data[32:] = p.data[:32]


@pytest.mark.parametrize("when", ["before", "in a checkpoint"])
def test_parts_that_are_alike_in_the_model_itself_are_left(when: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        whole = model("added")
        if when == "before":
            _copies(whole)
        part = tpcore.parallelize(whole, plan=PLAN)
        if when != "before":
            other = model("added")
            _copies(other)
            part.load_state_dict(other.state_dict())
        part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()

    run_ranks(TWO, rank)


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise KeyError("halfway")


def test_a_backward_that_raises_halfway_is_none_of_the_first() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("of features"), plan=OF_FEATURES, sequence_parallel=True)
        handle = part.model.layers[1].register_forward_hook(lambda m, a, y: _Raise.apply(y))
        with pytest.raises(KeyError):
            part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        handle.remove()
        with pytest.raises(ValueError, match="differs between them"):
            part(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()

    run_ranks(TWO, rank)


def test_parameters_without_a_digest_are_left() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        whole = model("added")
        whole.model.norm.turn = nn.Parameter(torch.ones(32, dtype=torch.complex64))
        whole.model.norm.register_forward_hook(lambda m, a, y: y * m.turn.abs())
        tpcore.parallelize(whole, plan=PLAN)(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()

    run_ranks(TWO, rank)


def test_a_hook_that_would_see_a_part_of_a_sum_is_refused() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        part = tpcore.parallelize(model("added"), plan=PLAN)
        with pytest.raises(ValueError, match=r"part of a sum.*register it on the module around it"):
            part.model.layers[0].self_attn.q_proj.register_full_backward_hook(lambda *_: None)

    run_ranks(TWO, rank)
