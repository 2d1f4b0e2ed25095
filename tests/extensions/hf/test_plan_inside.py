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
from helpers.hf import llama
from torch import Tensor, nn

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


WHOLE = {Before: "squeeze norm widen", After: "scale router", Latent: "norm squeeze"}


@pytest.mark.parametrize("kind", WHOLE)
def test_modules_that_see_whole_values_alone_are_whole_if_a_rule_says_so(kind: type[Network]) -> None:
    plan = {f"model.layers.*.mlp.{name}": "replicate" for name in WHOLE[kind].split()}
    hf.assert_equals_whole(lambda: with_network(kind), (2,), plan=plan)


REACHED = {Scaled: "scale", Gated: "router", Activated: "act", Normed: "norm"}
REACHED |= {kind: names.split()[0] for kind, names in WHOLE.items()}


@pytest.mark.parametrize("kind", REACHED)
def test_a_module_that_sharded_features_may_reach_is_refused_by_name(kind: type[Network]) -> None:
    hf.refused(rf"model\.layers\.\*\.mlp\.{REACHED[kind]} \(.*is whole inside", lambda: with_network(kind))


@pytest.mark.parametrize(("kind", "name"), [(Activated, "mlp.act"), (Scaled, "mlp")])
def test_the_remedy_of_the_refusal_is_right(kind: type[Network], name: str) -> None:
    plan = {f"model.layers.*.{name}": "replicated_with_grad_allreduce"}
    hf.assert_equals_whole(lambda: with_network(kind), (2,), plan=plan)


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
