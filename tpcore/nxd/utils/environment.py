"""Small functions for scripts: the device, the end of a step, messages of rank 0."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import torch.nn.functional as F

from ... import settings
from ...backend.interface import Backend
from ...backend.registry import load_backend
from ...layers.tokens import TokenOrder
from ...runtime.context import current, is_initialized
from ...runtime.init import default_backend


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


def master_print(msg: Any) -> None:
    """Print on rank 0."""
    if not _other_than_first():
        sys.stdout.write(f"{msg}\n")
        sys.stdout.flush()


def _other_than_first() -> bool:
    return (current().rank if is_initialized() else settings.RANK.get()) != 0


def get_rank_info_str() -> str:
    """This rank's coordinates for names of logs: ``DP_0_TP_1_PP_0``."""
    if not is_initialized():
        return "model_parallel_uninitialized"
    where, sizes = current().mesh.coords(current().rank), current().mesh.axes
    others = [axis for axis in ("ep", "cp") if sizes.get(axis, 1) > 1]  # without them two ranks had one name
    return "_".join(f"{axis.upper()}_{where.get(axis, 0)}" for axis in ("dp", "tp", "pp", *others))


class _FirstRankOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _other_than_first()


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """The logger ``name``. With ``rank0_only``, only the first rank logs. The program configures its
    handlers, as for any logger of ``logging``."""
    logger = logging.getLogger(f"{name}[0]" if rank0_only else name)
    if rank0_only and not any(isinstance(f, _FirstRankOnly) for f in logger.filters):
        logger.addFilter(_FirstRankOnly())
    return logger


def get_batch_on_this_context_parallel_rank(batch: Any) -> Any:
    """This rank's contiguous tokens of ``batch``, tensors ``[batch, tokens]`` by name with ``labels`` shifted before,
    for a model on ``nki_ring_attn_func``; at cp 1 the batch itself. A model of ``tpcore.parallelize`` takes the
    whole batch. ValueError if cp does not divide the tokens."""
    comm = current().over_axis("cp") if is_initialized() else None
    if comm is None:
        return batch
    labels = {"labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]} if "labels" in batch else {}
    return {name: TokenOrder(comm).cut(t) for name, t in {**batch, **labels}.items()}
