"""The check that an optimizer treats each entry of a parameter independently, as ``Zero1`` requires."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_NORMS = "it scales a parameter's update by norms of all of it"
_FACTORS = "it keeps statistics of whole rows and columns"
MIXING = {
    "Adafactor": _FACTORS,
    "CAME": _FACTORS,
    "LAMB": _NORMS,
    "LARS": _NORMS,
    "LBFGS": "its direction comes from all parameters together",
    "Muon": "it orthogonalizes whole matrices",
    "NovoGrad": _NORMS,
    "SM3": _FACTORS,
    "SOAP": _FACTORS,
    "Shampoo": _FACTORS,
    "SparseAdam": "it takes sparse gradients only, and a mean over dp is dense",
}
"""Optimizers that mix entries, with the reason. The case of names does not count."""

# options of the implementation that do not change the result; some of them need a device
_WAYS = ("capturable", "differentiable", "foreach", "fused")


def check_elementwise(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> frozenset[str]:
    """Raise ValueError for an optimizer that mixes entries: known by name, or found by two small steps.

    Returns the keys of its state that have a value for each entry.
    """
    known = {name.lower(): why for name, why in MIXING.items()}
    why = next((known[c.__name__.lower()] for c in cls.__mro__ if c.__name__.lower() in known), None)
    if why is not None:
        raise ValueError(_refusal(cls, why))
    like = {key: value for key, value in options.items() if key not in _WAYS}
    values = torch.linspace(-1, 2, 12, dtype=torch.float64, device="cpu").view(3, 4)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        whole, states = _stepped(cls, like, [values])
        rows, _ = _stepped(cls, like, [*values])
    # 1e-9 in float64: kernels may round the last bits of a short tensor differently
    if not torch.allclose(whole[0], torch.stack(rows), rtol=1e-9, atol=1e-9):
        raise ValueError(_refusal(cls, "a step of a whole tensor is not that of its rows, each by itself"))
    return frozenset(key for key, v in states[0].items() if isinstance(v, Tensor) and v.shape == (3, 4))


def _stepped(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], values: list[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The parameters and their states after two steps."""
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = cls(params, **options)
    for _ in range(2):
        for p in params:
            p.grad = p.detach() ** 3 + 0.5
        optimizer.step()
    return [p.detach() for p in params], [dict(optimizer.state[p]) for p in params]


def _refusal(cls: type, why: str) -> str:
    return (
        f"Zero1 gives an optimizer a part of each parameter, and {cls.__name__} mixes its entries: {why}. "
        "Use it without Zero1, or one that treats each entry by itself, such as AdamW or SGD"
    )
