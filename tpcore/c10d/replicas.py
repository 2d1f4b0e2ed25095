"""A check of models in DistributedDataParallel: its ranks must have copies of one model, not shards."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..layers.sharding import Sharding, sharding


def refuse_shards_as_replicas() -> RemovableHandle:
    """Until the handle is removed, DistributedDataParallel raises ValueError on all of its ranks if their
    parts of a parameter differ. It would overwrite all parts by its first rank's, and average gradients of
    different entries. accelerate and Fabric wrap models in it too."""
    handle: RemovableHandle = register_module_module_registration_hook(_look)
    return handle


def _look(owner: nn.Module, name: str, module: Any) -> None:
    if not isinstance(owner, DistributedDataParallel) or name != "module":
        return
    # DDP's constructor has chosen the group when it registers the model, and has sent nothing yet
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
    """Whether rank ``other`` of the job has the same entries as this rank."""
    ctx, me = found.ctx, dist.get_rank()
    if ctx.mesh.size != dist.get_world_size():  # cut over a group of no mesh axes: ParallelContext.over
        members = ctx.world.group.members(me)
        return other == me or other not in members
    return found.layout.boxes(me, ctx.mesh) == found.layout.boxes(other, ctx.mesh)
