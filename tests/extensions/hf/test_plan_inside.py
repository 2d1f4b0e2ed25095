"""Whole modules inside sharded blocks: right without a rule, or refused by name; and inputs that layers share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import hf
from helpers.hf import llama, text
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks
from tpcore_hf.plan.inputs import argument_of_calls

HIDDEN, WIDE = 32, 64
Parts = dict[str, Callable[[], nn.Module | nn.Parameter]]
ACT: Parts = {"act": nn.PReLU}
SCALE: Parts = {"scale": lambda: nn.Parameter(torch.ones(1))}
ROUTER: Parts = {"router": lambda: nn.Linear(HIDDEN, 1)}


class Network(nn.Module):
    """A feed-forward block in the place of Llama's, with ``more`` in it."""

    more: Parts = {}

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.down_proj = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        for name, make in self.more.items():
            setattr(self, name, make())

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)))


class Before(Network):
    more = {"squeeze": lambda: nn.Linear(HIDDEN, 4), "norm": lambda: nn.LayerNorm(4)}
    more |= {"widen": lambda: nn.Linear(4, HIDDEN)}

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.widen(self.norm(self.squeeze(x)))
        return self.down_proj(F.silu(self.gate_proj(x)))


class After(Network):
    more = SCALE | ROUTER

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_proj(x)
        h = self.down_proj(F.silu(h))
        return self.scale * h * torch.sigmoid(self.router(x))


class Scaled(Network):
    more = SCALE

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.scale * self.gate_proj(x))


class Gated(Network):
    """The gate sees whole inputs, but its gradient is of this rank's features."""

    more = ROUTER

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.router(x))
        hidden = self.gate_proj(x)
        return self.down_proj(hidden.mul(gate))


class Activated(Network):
    more = ACT

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            x = self.gate_proj(x)
            x = self.act(x)
        return self.down_proj(x)


class Normed(Network):
    """A norm of the features of all ranks, which no rank has alone."""

    more = {"norm": lambda: nn.LayerNorm(WIDE)}

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.norm(self.gate_proj(x)))


def with_network(kind: type[Network]) -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = kind()
    return model


class Latent(Network):
    """Its norm is as wide as a head would be."""

    more = {"norm": lambda: nn.LayerNorm(4), "squeeze": lambda: nn.Linear(HIDDEN, 6)}
    more |= {"up_proj": lambda: nn.Linear(4, WIDE)}
    head_dim = 4

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate_proj(x))
        latent, _ = torch.split(self.squeeze(x), [4, 2], dim=-1)
        return self.down_proj(torch.mul(gate, self.up_proj(self.norm(torch.relu(latent)))))


class Read(Network):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(F.linear(x, self.gate_proj.weight, self.gate_proj.bias)))


class Penalized(Network):
    """What is read is found also where the forward then needs values."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.down_proj.weight.chunk(2)[0].square().sum()
        return super().forward(x) + (penalty if penalty > 0 else 0)


class Regularized(transformers.LlamaForCausalLM):
    """In training alone, where there are labels."""

    def forward(self, *args: Any, labels: Tensor | None = None, **options: Any) -> Any:
        out = super().forward(*args, labels=labels, **options)
        if labels is not None and self.training:
            out.loss = out.loss + self.lm_head.weight.square().sum()
        return out


class Weighted(transformers.LlamaForCausalLM):
    """Not tried, for no dummy has such weights."""

    def forward(self, weight: dict[str, float], **options: Any) -> Any:
        return super().forward(**options) if weight["loss"] else None


class Mixed(transformers.models.llama.modeling_llama.LlamaAttention):
    """A rank has some of the heads of which it takes the mean."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        rows = hidden_states.shape[:2]
        q, k, v = (
            layer(hidden_states).view(*rows, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y + y.mean(1, keepdim=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None


class Direct(Network):
    """Without the calls of its layers, and with the type and the place of a parameter alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_proj.forward(x.to(self.gate_proj.weight.dtype))
        return (
            self.down_proj.forward(F.silu(h.to(self.down_proj.weight)))
            + self.down_proj.weight.new_ones(())
            + self.down_proj.bias
        )


WHOLE = {Before: "squeeze norm widen", After: "scale router", Latent: "norm squeeze"}


@pytest.mark.parametrize("kind", WHOLE)
def test_modules_that_see_whole_values_alone_are_whole_if_a_rule_says_so(kind: type[Network]) -> None:
    plan = {f"model.layers.*.mlp.{name}": "replicate" for name in WHOLE[kind].split()}
    hf.assert_equals_whole(lambda: with_network(kind), (2,), plan=plan)


REACHED = {Scaled: "scale", Gated: "router", Activated: "act", Normed: "norm"}
REACHED |= {kind: names.split()[0] for kind, names in WHOLE.items()}


@pytest.mark.parametrize("kind", REACHED)
def test_a_module_that_sharded_features_may_reach_is_refused_by_name(kind: type[Network]) -> None:
    words = "fails with what a rank has: .*layer_norm sees only 32 of 64" if kind is Normed else "is whole inside"
    hf.refused(rf"model\.layers\.\*\.mlp\.{REACHED[kind]} \(.*{words}", lambda: with_network(kind))


GATHERED = {"model.layers.*.mlp.gate_proj": "colwise_gather_output", "model.layers.*.mlp.down_proj": "replicate"}


@pytest.mark.parametrize(
    ("kind", "name", "plan"), [(Read, "gate_proj", {}), (Penalized, "down_proj", {}), (Read, "gate_proj", GATHERED)]
)
def test_a_forward_that_reads_a_parameter_is_refused_and_is_right_whole(
    kind: type[Network], name: str, plan: dict[str, str]
) -> None:
    words = rf"mlp \({kind.__name__}\) reads a parameter of model\.layers\.\*\.mlp\.{name} itself"
    hf.refused(words, lambda: with_network(kind), plan=plan)
    hf.assert_equals_whole(lambda: with_network(kind), (2,), plan=plan | {"model.layers.*.mlp": "replicate"})


def of(kind: Any) -> Any:
    return kind(llama().config)


def test_a_forward_is_tried_with_labels_in_training() -> None:
    hf.refused(r"its forward \(Regularized\) reads a parameter of lm_head itself", lambda: of(Regularized).eval())


def test_a_forward_that_was_not_tried_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tpcore")
    run_ranks(Mesh({"tp": 2}), lambda ctx: tpcore.parallelize(of(Weighted)))
    (said,) = (r.getMessage() for r in caplog.records if "not tried" in r.getMessage())
    assert said.startswith("Weighted: whether its forward takes what a rank has was not tried")
    assert "missing 1 required positional argument: 'weight'" in said


def test_a_mean_over_the_heads_of_a_rank_is_refused() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = llama()
        model.model.layers[0].self_attn = Mixed(model.config, 0)
        with pytest.raises(ValueError, match="mean sees only 2 of 4 features"):
            tpcore.parallelize(model)(**text())

    run_ranks(Mesh({"tp": 2}), rank)


def test_a_forward_may_be_called_and_the_type_of_a_parameter_read() -> None:
    hf.assert_equals_whole(lambda: with_network(Direct), (2,))


@pytest.mark.parametrize(("kind", "name"), [(Activated, "mlp.act"), (Scaled, "mlp")])
def test_the_remedy_of_the_refusal_is_right(kind: type[Network], name: str) -> None:
    plan = {f"model.layers.*.{name}": "replicated_with_grad_allreduce"}
    hf.assert_equals_whole(lambda: with_network(kind), (2,), plan=plan)


class Fused(nn.Module):
    """Attention with each head's query, key and value side by side. ``names``: of the heads' number and size."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.names, self.scale = names, torch.ones(8)  # no buffer
        vars(self).update(zip(names, (4, 8), strict=True))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads, size = (getattr(self, name) for name in self.names)
        qkv = self.qkv(x).view(*x.shape[:2], heads, 3, size) * self.scale
        y = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4).unbind(0))
        return self.out(y.transpose(1, 2).flatten(2))


class Own(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig

    def __init__(self, *names: str) -> None:
        super().__init__(transformers.LlamaConfig(**hf.TINY))
        self.table, self.lm_head = nn.Embedding(99, HIDDEN), nn.Linear(HIDDEN, 99)
        mlp = nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN))
        block = {"attn": Fused((names[0], names[1])), "norm": nn.LayerNorm(HIDDEN), "mlp": mlp}
        self.blocks, self.seen = nn.ModuleList([nn.ModuleDict(block)]), list[Tensor]()
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x))
            x = x + block["mlp"](x)
        self.seen.append(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


KNOWN, OTHER = ("num_heads", "head_dim"), ("heads", "size")
OF_ATTENTION = {"blocks.*.attn.qkv": "colwise", "blocks.*.attn.out": "rowwise"}
UP, DOWN = {"blocks.*.mlp.0": "colwise"}, {"blocks.*.mlp.2": "rowwise"}
FAILS = {
    "heads of another name": (OTHER, OF_ATTENTION, r"attn \(Fused\) fails .*is invalid.*qkv gives .* 96 .*num_heads"),
    "a column layer alone": (KNOWN, OF_ATTENTION | UP, r"mlp\.2 \(Linear\) fails .*mlp\.0 gives a part of its 64"),
    "a row layer alone": (
        KNOWN,
        OF_ATTENTION | DOWN,
        r"mlp\.2 \(Linear\) fails .*of its 64 .* no 'colwise' layer gave one",
    ),
}


@pytest.mark.parametrize("what", FAILS)
def test_a_forward_that_does_not_take_a_ranks_part_is_refused_by_name(what: str) -> None:
    names, plan, words = FAILS[what]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = hf.double(lambda: Own(*names))
        want = model(**text()).logits
        before = [dict(vars(module)) for module in model.modules()]
        with pytest.raises(ValueError, match=rf"blocks\.\*\.{words}"):
            tpcore.parallelize(model, plan=plan)
        assert [dict(vars(module)) for module in model.modules()] == before
        assert len(model.seen) == 1
        torch.testing.assert_close(model(**text()).logits, want, rtol=0, atol=0)

    run_ranks(Mesh({"tp": 2}), rank)


@pytest.mark.parametrize(("names", "plan"), [(KNOWN, OF_ATTENTION), (OTHER, {"blocks.*.attn": "replicate"})])
def test_a_model_of_ones_own_equals_the_whole(names: tuple[str, str], plan: dict[str, str]) -> None:
    hf.assert_equals_whole(lambda: Own(*names), (2, 4), plan=plan | UP | DOWN)


def residual(forward: Any) -> Any:
    @wraps(forward)
    def added(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) + x

    return added


class Decorated(transformers.models.llama.modeling_llama.LlamaMLP):
    """Its source says that projections alone read its input."""

    forward = residual(transformers.models.llama.modeling_llama.LlamaMLP.forward)


def test_an_input_is_shared_in_forwards_of_transformers_alone() -> None:
    def with_mlp() -> Any:
        model = llama()
        for layer in model.model.layers:
            layer.mlp = Decorated(model.config)
        return model

    hf.assert_equals_whole(with_mlp, (2,))
    assert argument_of_calls(llama().model.layers[0].mlp, {"gate_proj", "up_proj"}) == "x"
    assert argument_of_calls(llama().model.layers[0].mlp, {"gate_proj", "down_proj"}) is None
    assert argument_of_calls(llama().model.layers[0], {"self_attn", "mlp"}) is None
