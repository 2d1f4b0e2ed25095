"""Tensor parallelism for PyTorch: the maths once, over collectives that plugins provide."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from .train.pipeline import PipelinedLayers, PipelineModel
from .train.step import optimizer_step, overlap_grad_reduce
from .train.zero import Zero1

if TYPE_CHECKING:
    from . import checkpoint, trace
    from .diagnose.explain import explain
    from .diagnose.plan.search import plan
    from .models import lazy, parallelize, shard_sequence
    from .processes.launch import launch


# where an import of a path that scripts of older releases have is told the new one
__path__.append(f"{__path__[0]}/nxd/moved")

# on first use: the launcher pulls in torch's elastic agent, and few programs need all of these
_LATER = {
    "explain": "diagnose.explain",
    "plan": "diagnose.plan.search",
    "launch": "processes.launch",
    **dict.fromkeys(("lazy", "parallelize", "shard_sequence"), "models"),
}
_MOVED = {
    name: room
    for room, names in {
        "backend": "Backend Capabilities backends hookimpl",
        "checkpoint": "dtensor_state_dict",
        "comm": "Comm Transport",
        "diagnose": "check_replicas",
        "layers": "ColumnParallelConv1D ContextParallelAttention RowParallelConv1D move_model_to_device shard_specs "
        "share_input",
        "layout": "Group Layout divide",
        "models": "ExpertLoad full_state_dict trace_causal_lm",
        "runtime": "keep_freed_memory",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "diagnose", "models", "nxd", "trace"):
        return import_module(f"{__name__}.{name}")
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    moved = f": it is tpcore.{_MOVED[name]}.{name}" if name in _MOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{moved}")


__all__ = [
    "BackendError",
    "Block",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ColumnParallelLinear",
    "LayerNorm",
    "Mesh",
    "ParallelContext",
    "ParallelEmbedding",
    "ParallelModule",
    "ParallelQKV",
    "PeerLostError",
    "PipelineModel",
    "PipelinedLayers",
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
