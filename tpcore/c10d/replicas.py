"""What torch's data parallelism takes for copies of one model must be that: looked at as it is wrapped."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..layers.sharding import Sharding, sharding


def refuse_shards_as_replicas() -> RemovableHandle:
    """From now on, until the handle is removed, DistributedDataParallel over ranks whose parts of a parameter
    differ is a ValueError on all of them. It would put its first rank's part in the place of the others', and
    average gradients of different entries. accelerate and Fabric wrap models in it too."""
    handle: RemovableHandle = register_module_module_registration_hook(_look)
    return handle


def _look(owner: nn.Module, name: str, module: Any) -> None:
    if not isinstance(owner, DistributedDataParallel) or name != "module":
        return
    # its constructor has chosen the group when it takes the model, and sends nothing before
    ranks = dist.get_process_group_ranks(owner.process_group)
    for parameter_name, parameter in module.named_parameters():
        found = sharding(parameter)
        unlike = [] if found is None else [r for r in ranks if not _same_part(found, r)]
        if unlike:
            me = dist.get_rank()
            raise ValueError(
                f"DistributedDataParallel over ranks {ranks}, which hold different parts of "
                f"{parameter_name!r}: rank {unlike[0]} has another part than rank {me}, and would lose it. "
                "Pass process_group=ctx.comm('dp').process_group, or leave DistributedDataParallel out and "
                "call tpcore.optimizer_step"
            )


def _same_part(found: Sharding, other: int) -> bool:
    """Whether rank ``other`` of the job holds the same entries as this one."""
    ctx, me = found.ctx, dist.get_rank()
    if ctx.mesh.size != dist.get_world_size():  # a group that no axes of the mesh make, as a mesh of its own
        members = ctx.world.group.members(me)
        return other == me or other not in members
    return found.layout.boxes(me, ctx.mesh) == found.layout.boxes(other, ctx.mesh)
