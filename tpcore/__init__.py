"""Tensor parallelism for PyTorch: the maths once, over collectives that plugins provide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import layers, optim, random
from .backend.capabilities import Capabilities
from .backend.interface import Backend, hookimpl
from .backend.registry import backends
from .comm import Comm
from .context import ParallelContext, current, is_initialized, use
from .errors import (
    BackendError,
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from .init import init, shutdown
from .layers import *  # noqa: F403  a layer is exported in one place, there
from .layers.loss import parallel_cross_entropy
from .layers.module import ParallelModule, move_model_to_device
from .layers.sharding import shard_specs
from .layout import Layout
from .memory import keep_freed_memory
from .mesh import Group, Mesh
from .shard import Block, ShardSpec, divide
from .train.clip import clip_grad_norm
from .train.data_parallel import reduce_gradients
from .train.pipeline import PipelinedLayers, PipelineModel
from .train.replicas import check_replicas
from .train.step import optimizer_step
from .train.zero import Zero1
from .transport import Transport

if TYPE_CHECKING:
    from . import checkpoint, parallel_layers, trace
    from .c10d.dtensor import dtensor_state_dict
    from .explaining import explain
    from .parallel_layers import parallel_state
    from .plans import full_state_dict, lazy, parallelize
    from .plans.cached import trace_causal_lm
    from .processes.launch import launch

__version__ = "0.1.0"

_PACKAGES = frozenset(
    [
        "checkpoint",
        "kernels",
        "modules",
        "optimizer",
        "overrides",
        "parallel_layers",
        "parallel_state",
        "pipeline",
        "trace",
        "trainer",
        "utils",
    ]
)
_TRAINER = frozenset(
    [
        "finalize_checkpoint",
        "has_checkpoint",
        "initialize_parallel_model",
        "initialize_parallel_optimizer",
        "load_checkpoint",
        "neuronx_distributed_config",
        "save_checkpoint",
    ]
)
"""What scripts of NeuronX Distributed's trainer call by the package's own name."""


def __getattr__(name: str) -> Any:
    # on first use: the launcher pulls in torch's elastic agent, few programs need all of them
    if name == "launch":
        from .processes.launch import launch

        return launch
    if name == "dtensor_state_dict":
        from .c10d.dtensor import dtensor_state_dict

        return dtensor_state_dict
    if name == "explain":
        from .explaining import explain

        return explain
    if name in ("full_state_dict", "lazy", "parallelize"):
        from . import plans

        return getattr(plans, name)
    if name == "trace_causal_lm":
        from .plans.cached import trace_causal_lm

        return trace_causal_lm
    if name in _PACKAGES:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    if name in _TRAINER:
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Backend",
    "BackendError",
    "Block",
    "Capabilities",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Comm",
    "Group",
    "Layout",
    "Mesh",
    "ParallelContext",
    "ParallelModule",
    "PeerLostError",
    "PipelineModel",
    "PipelinedLayers",
    "ShardSpec",
    "Transport",
    "Zero1",
    "backends",
    "check_replicas",
    "checkpoint",
    "clip_grad_norm",
    "current",
    "divide",
    "dtensor_state_dict",
    "explain",
    "full_state_dict",
    "hookimpl",
    "init",
    "is_initialized",
    "keep_freed_memory",
    "launch",
    "lazy",
    "move_model_to_device",
    "optim",
    "optimizer_step",
    "parallel_cross_entropy",
    "parallel_layers",
    "parallel_state",
    "parallelize",
    "random",
    "reduce_gradients",
    "shard_specs",
    "shutdown",
    "trace",
    "trace_causal_lm",
    "use",
]
__all__ += layers.__all__
