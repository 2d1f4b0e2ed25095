"""Small functions and classes for scripts: the device, messages of rank 0, a float32 AdamW."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.nn.functional as F

from tpcore import settings
from tpcore.backend.interface import Backend
from tpcore.backend.registry import load_backend
from tpcore.layers.module import move_model_to_device
from tpcore.layers.tokens import TokenOrder
from tpcore.runtime.context import current, is_initialized
from tpcore.runtime.init import default_backend

from .paths import mirror

__all__ = ["AdamW_FP32OptimParams", "cpu_mode", "get_batch_on_this_context_parallel_rank", "get_device", "get_logger"]
__all__ += ["get_rank_info_str", "mark_step", "master_print", "move_model_to_device"]


def _backend() -> Backend:
    """The context's; without a context, for scripts ask at any time, the one that ``init`` would choose."""
    return current().backend if is_initialized() else load_backend(default_backend()[0])


def get_device() -> torch.device:
    """The device of this rank's tensors."""
    return _backend().device()


def cpu_mode() -> bool:
    """Whether the device is the CPU."""
    return get_device().type == "cpu"


def mark_step() -> None:
    """End of a training step, where ``tpcore.optimizer_step`` does not end it."""
    _backend().mark_step()


def ordinal(local: bool = False) -> int:
    """This process's rank in the job, also before initialization; ``local``: among those of its host."""
    if local and settings.LOCAL_RANK.is_set:
        return settings.LOCAL_RANK.get()
    return current().rank if is_initialized() else settings.RANK.get()


def _is_first(_: object = None) -> bool:
    return ordinal() == 0


def master_print(*args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = True) -> None:
    """Print on rank 0, to ``fd`` or stdout; ``local``: on the first rank of each host."""
    if ordinal(local) == 0:
        out = fd or sys.stdout
        out.write(f"{' '.join(map(str, args))}\n")
        if flush:
            out.flush()


class _Lines(logging.Handler):
    """Writes ``name: message`` to stderr, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"{record.name}: {self.format(record)}\n")


_lines = _Lines()


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """The logger ``name``. With ``rank0_only``, only the first rank logs. INFO is seen, as in NxD, unless the program
    sets another level."""
    logger = logging.getLogger(f"{name}[0]" if rank0_only else name)
    if rank0_only:
        logger.addFilter(_is_first)  # once: logging compares filters
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.addHandler(_lines)
    return logger


def get_rank_info_str() -> str:
    """This rank's coordinates for names of logs: ``DP_0_TP_1_PP_0``."""
    if not is_initialized():
        return "model_parallel_uninitialized"
    where, sizes = current().mesh.coords(current().rank), current().mesh.axes
    others = [axis for axis in ("ep", "cp") if sizes.get(axis, 1) > 1]  # without them two ranks had one name
    return "_".join(f"{axis.upper()}_{where.get(axis, 0)}" for axis in ("dp", "tp", "pp", *others))


def get_batch_on_this_context_parallel_rank(batch: Any) -> Any:
    """This rank's contiguous tokens of ``batch``, tensors ``[batch, tokens]`` by name with ``labels`` shifted before,
    for a model on ``nki_ring_attn_func``; at cp 1 the batch itself. A model of ``tpcore.parallelize`` takes the
    whole batch. ValueError if cp does not divide the tokens."""
    comm = current().over_axis("cp") if is_initialized() else None
    if comm is None:
        return batch
    labels = {"labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]} if "labels" in batch else {}
    return {name: TokenOrder(comm).cut(t) for name, t in {**batch, **labels}.items()}


def loss_of_closure(closure: Callable[[], Any] | None) -> Any:
    """What an optimizer's ``step(closure)`` begins with, and returns."""
    with torch.enable_grad():
        return None if closure is None else closure()


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
        loss = loss_of_closure(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad.float(), group)
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[p], group["betas"]
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
        state["step"] += 1
        state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        size = group["lr"]
        if group["correct_bias"]:
            size *= math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
        value = p.float().addcdiv(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
        p.copy_(value.mul_(1 - group["lr"] * group["weight_decay"]))


mirror(__name__, *(f"utils.{name}" for name in ("adamw_fp32_optim_params", "batch_utils", "logger", "model_utils")))
