"""Tensor parallelism for PyTorch: the maths once, over collectives that plugins provide."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .backend.registry import names
from .errors import BackendError, CheckpointError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from .layers import ColumnParallelLinear, LayerNorm, ParallelEmbedding, ParallelQKV, RMSNorm, RowParallelLinear
from .layers.apply import init_weights
from .layers.loss import parallel_cross_entropy
from .layers.module import ParallelModule
from .layout import Block, Mesh, ShardSpec
from .runtime import random
from .runtime.context import ParallelContext, current, is_initialized, use
from .runtime.init import init, shutdown
from .settings import __version__ as __version__
from .train.clip import clip_grad_norm
from .train.data_parallel import reduce_gradients
from .train.muon import Muon
from .train.pipeline import PipelinedLayers, PipelineModel
from .train.preemption import Preemption
from .train.step import optimizer_step, overlap_grad_reduce
from .train.zero import Zero1

if TYPE_CHECKING:
    from tpcore_explain.explain import explain
    from tpcore_hf import lazy, parallelize, shard_sequence
    from tpcore_plan.search import plan

    from . import checkpoint, trace
    from .processes.launch import launch


def __getattr__(name: str) -> Any:
    # on first use: the launcher pulls in torch's elastic agent, and few programs need all of these
    if name in ("checkpoint", "trace"):
        return import_module(f"{__name__}.{name}")
    module = f"{__name__}.processes.launch" if name == "launch" else names().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and no extension that is here adds it")
    return getattr(import_module(module), name)


__all__ = [
    "BackendError",
    "Block",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ColumnParallelLinear",
    "LayerNorm",
    "Mesh",
    "Muon",
    "ParallelContext",
    "ParallelEmbedding",
    "ParallelModule",
    "ParallelQKV",
    "PeerLostError",
    "PipelineModel",
    "PipelinedLayers",
    "Preemption",
    "RMSNorm",
    "RowParallelLinear",
    "ShardSpec",
    "Zero1",
    "checkpoint",
    "clip_grad_norm",
    "current",
    "explain",
    "init",
    "init_weights",
    "is_initialized",
    "launch",
    "lazy",
    "optimizer_step",
    "overlap_grad_reduce",
    "parallel_cross_entropy",
    "parallelize",
    "plan",
    "random",
    "reduce_gradients",
    "shard_sequence",
    "shutdown",
    "trace",
    "use",
]
