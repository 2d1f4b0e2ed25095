"""AdamW whose state and arithmetic are float32 for parameters of any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class AdamW_FP32OptimParams(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101), in float32.

    Moments are float32, and a step is computed in float32 and rounded to the parameter's dtype once.
    ``correct_bias``: divide the moments by what they miss in the first steps.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW_FP32OptimParams: lr={lr}, eps={eps}, betas={betas} are no such values")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[p], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        state["step"] += 1
        grad, value = p.grad.float() if p.grad is not None else p, p.float()
        state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        size = group["lr"]
        if group["correct_bias"]:
            size *= math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
        value = value.addcdiv(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
        p.copy_(value.mul_(1 - group["lr"] * group["weight_decay"]))
