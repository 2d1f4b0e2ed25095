"""The optimizer of a training script, whose step does everything that follows backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...train.step import optimizer_step
from ..optimizer.zero_redundancy_optimizer import NeuronZero1Optimizer
from ..parallel_layers.grads import allreduce_sequence_parallel_gradients
from .config import Config


class NxDOptimizer(torch.optim.Optimizer):
    """``optimizer`` with a step that takes the mean over dp, clips and steps, as the configuration says.

    Groups, state and defaults are those of ``optimizer``, so that schedulers work on either.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Config) -> None:
        # not Optimizer.__init__: there is one set of groups
        self.optimizer, self.nxd_config = optimizer, nxd_config
        self._grad_norm: Tensor | None = None

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradient before clipping; None without clipping."""
        return self._grad_norm

    def __getattr__(self, name: str) -> Any:
        if name in ("param_groups", "state", "defaults"):
            return getattr(self.optimizer, name)
        raise AttributeError(f"NxDOptimizer has no attribute {name!r}")

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.nxd_config["sequence_parallel"]:
            allreduce_sequence_parallel_gradients(self.optimizer)
        config = self.nxd_config["optimizer_config"]
        norm = float(config["max_grad_norm"]) if config["grad_clipping"] else None
        self._grad_norm = optimizer_step(self.optimizer, max_norm=norm)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"


def initialize_parallel_optimizer(
    nxd_config: Config, optimizer_class: type[torch.optim.Optimizer], parameters: Any, **defaults: Any
) -> NxDOptimizer:
    """``optimizer_class(parameters, **defaults)``, or ZeRO-1 over it, with a step that does all. Give
    ``model.named_parameters()``: then its state opens at other degrees."""
    config, precision = nxd_config["optimizer_config"], nxd_config["mixed_precision_config"]
    if not config["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(parameters, **defaults), nxd_config)
    zero1 = NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        grad_clipping=config["grad_clipping"],
        max_norm=config["max_grad_norm"],
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        # bfloat16 is wider than no parameter: there is no master copy then
        optimizer_dtype=torch.float32 if precision["use_master_weights"] else torch.bfloat16,
        **defaults,
    )
    return NxDOptimizer(zero1, nxd_config)
