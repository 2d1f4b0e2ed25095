"""Other libraries made ready for use, each over its own group of the same two processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from tpcore.comm.comm import Comm
from tpcore.runtime.context import current
from tpcore.settings import changed

from .harness import say

T = TypeVar("T")


def importable(makers: dict[str, Callable[[], T]]) -> Iterator[T]:
    """What the makers make; those that miss a package are named and left out."""
    for name, make in makers.items():
        try:
            with warnings.catch_warnings():  # of optional parts that they were installed without
                warnings.simplefilter("ignore")
                yield make()
        except ImportError as e:
            say(f"- left out: {name} ({e})")


def fairscale_layers() -> Any:
    """fairscale's module of layers, initialised. ImportError without fairscale."""
    from fairscale.nn.model_parallel import initialize, layers

    if not initialize.model_parallel_is_initialized():
        initialize.initialize_model_parallel(dist.get_world_size(), model_parallel_backend="gloo")
    return layers


def megatron_options() -> dict[str, Any]:
    """Keyword arguments that its layers need on a CPU. ImportError without megatron-core."""
    from megatron.core import ModelParallelConfig, parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,  # a CUDA kernel
    )
    return {"config": config, "init_method": nn.init.xavier_normal_}


def deepspeed_operator(rank: int) -> Callable[[Tensor], Tensor]:
    """DeepSpeed's all-reduce over shared memory, which adds in place. ImportError without deepspeed."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    with changed({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_SIZE": str(dist.get_world_size())}):
        ShareMemCommBuilder().load().initialize(dist.get_world_size(), rank)
    operator: Callable[[Tensor], Tensor] = torch.ops.deepspeed.inference_all_reduce_
    return operator


class FirstOfPair(nn.Module):
    """Megatron-core's layers return (output, bias)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def mesh() -> DeviceMesh:
    return DeviceMesh.from_group(own_group(), "cpu", mesh_dim_names=("tp",))


def own_group() -> Any:
    """Both processes, over connections and threads that no other contestant uses: on a group that another
    one keeps awake the floor was seen to take little more than half of its own time."""
    return dist.new_group()


def gloo_comm() -> Comm:
    """tpcore's group of both processes, kept off shared memory."""
    with changed({"TPCORE_SHM": "0"}):
        return current().comm_for(own_group())


def wait(y: Tensor) -> Tensor:
    """torch's layers hand out a tensor whose sum may still be under way."""
    return y.wait() if isinstance(y, AsyncCollectiveTensor) else y


def local(t: Tensor) -> Tensor:
    """A DTensor's shard; any other tensor itself."""
    to_local = getattr(t, "to_local", None)
    return t if to_local is None else to_local()
