"""Tensor parallelism for PyTorch: the maths once, over collectives that plugins provide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import layers
from .backend.interface import Backend, Capabilities, hookimpl
from .backend.registry import backends
from .comm.comm import Comm
from .comm.transport import Transport
from .diagnose.replicas import check_replicas
from .errors import (
    BackendError,
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from .layers import *  # noqa: F403  a layer is exported in one place, there
from .layers.loss import parallel_cross_entropy
from .layers.module import ParallelModule, move_model_to_device
from .layers.sharding import shard_specs
from .layout.layout import Layout
from .layout.mesh import Group, Mesh
from .layout.shard import Block, ShardSpec, divide
from .runtime import random
from .runtime.context import ParallelContext, current, is_initialized, use
from .runtime.init import init, shutdown
from .runtime.memory import keep_freed_memory
from .settings import __version__ as __version__
from .train.clip import clip_grad_norm
from .train.data_parallel import reduce_gradients
from .train.pipeline import PipelinedLayers, PipelineModel
from .train.step import optimizer_step
from .train.zero import Zero1

if TYPE_CHECKING:
    from . import checkpoint, trace
    from .checkpoint.dtensor import dtensor_state_dict
    from .diagnose.explain import explain
    from .models import ExpertLoad, full_state_dict, lazy, parallelize, shard_sequence
    from .models.cached import trace_causal_lm
    from .processes.launch import launch


# where an import of a path that scripts of older releases have is told the new one
__path__.append(f"{__path__[0]}/nxd/moved")  # noqa: F405  each package has it


def __getattr__(name: str) -> Any:
    # on first use: the launcher pulls in torch's elastic agent, few programs need all of them
    if name == "launch":
        from .processes.launch import launch

        return launch
    if name == "dtensor_state_dict":
        from .checkpoint.dtensor import dtensor_state_dict

        return dtensor_state_dict
    if name == "explain":
        from .diagnose.explain import explain

        return explain
    if name in ("ExpertLoad", "full_state_dict", "lazy", "parallelize", "shard_sequence"):
        from . import models as plans

        return getattr(plans, name)
    if name == "trace_causal_lm":
        from .models.cached import trace_causal_lm

        return trace_causal_lm
    if name in ("checkpoint", "nxd", "trace"):
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
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
    "ExpertLoad",
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
    "optimizer_step",
    "parallel_cross_entropy",
    "parallelize",
    "random",
    "reduce_gradients",
    "shard_sequence",
    "shard_specs",
    "shutdown",
    "trace",
    "trace_causal_lm",
    "use",
]
__all__ += layers.__all__
