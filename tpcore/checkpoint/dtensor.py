"""The state dict of a cut model as DTensors over a DeviceMesh, for torch's own tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..c10d.backend import C10dBackend
from ..errors import BackendError
from ..layers.sharding import sharding
from ..layout.layout import Layout
from ..layout.shard import ShardSpec
from ..runtime.context import ParallelContext, current


def dtensor_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with DTensors, which share memory with the model. Collective.

    In a plain state dict the tp ranks' parts have the same name, and ``torch.distributed.checkpoint`` keeps
    only one of them. Of DTensors it keeps all parts, and its ``load`` into such a dict fills the model at any
    tp. The DeviceMesh has the axes of the mesh.

    A parameter of several blocks (``stride=``, ``blocks=``) becomes one DTensor for each block,
    ``qkv.weight.0`` and so on, because a DTensor is sharded once. Padding is left out. An optimizer's state is
    not included: use ``tpcore.checkpoint`` for it.

    Raises TypeError for anything but a module, BackendError on backends without torch.distributed, and
    ValueError for a cut that a DTensor cannot express: over several axes, or padded by whole heads.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"dtensor_state_dict takes a module, not {type(model).__name__}. For an optimizer's state use "
            "tpcore.checkpoint.save, which keeps the parts of all ranks"
        )
    ctx = current()
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        state.update(_entries(ctx, name, value) if isinstance(value, Tensor) else {name: value})
    return state


def _entries(ctx: ParallelContext, name: str, value: Tensor) -> Iterator[tuple[str, DTensor]]:
    mark, local = sharding(value), value.detach()
    layout = Layout(tuple(value.shape)) if mark is None else mark.layout
    if mark is not None and mark.ctx.mesh != ctx.mesh:
        raise ValueError(f"{name!r} is sharded over a group that no axes of {ctx.mesh} make: no DTensor says that")
    if layout.slot is not None or len(layout.cuts) > 1 or any(len(cut.axes) > 1 for cut in layout.cuts):
        raise ValueError(f"{name!r} is {layout}, which no DTensor says: use tpcore.checkpoint")
    if not layout.cuts:
        yield name, _over(ctx, local, layout.shape)
        return
    (cut,), dim = layout.cuts, layout.spec.dim or 0
    (axis,), n, start = cut.axes, cut.degree(ctx.mesh), 0
    for number, block in enumerate(cut.spec.blocks):
        shape = (*layout.shape[:dim], block.size, *layout.shape[dim + 1 :])
        spec = ShardSpec(shape, dim, (block,))
        (copies,) = spec.block_copies(n)
        length = spec.local_shape(n)[dim]
        if min(length, block.size) != -(-block.size // (n // copies)):  # torch.chunk's, which DTensor uses
            raise ValueError(
                f"{name!r} is sharded by units of {block.unit} and padded at {axis}={n}: a DTensor pads by one"
            )
        (piece,) = spec.pieces(ctx.coord(axis), n)
        part = local.narrow(dim, start, piece.length)
        start += length
        whole = name if len(cut.spec.blocks) == 1 else f"{name}.{number}"
        yield whole, _over(ctx, part, shape, axis, dim, copies)


def _over(
    ctx: ParallelContext, local: Tensor, shape: tuple[int, ...], axis: str = "", dim: int = 0, copies: int = 1
) -> DTensor:
    """A DTensor of the full ``shape``, cut over ``axis``, if any, where ``copies`` neighbours have equal parts."""
    axes: dict[str, int] = {}
    for name, n in ctx.mesh.axes.items():
        if name == axis and copies > 1:  # the copies become an axis of their own, inside ``axis``
            axes |= {name: n // copies, f"{name}_copies": copies}
        elif n > 1 or name != "pp":
            axes[name] = n
    placements = [Shard(dim) if a == axis else Replicate() for a in axes]
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, device_mesh(ctx, axes), placements, run_check=False, shape=size, stride=stride)


def device_mesh(ctx: ParallelContext, axes: dict[str, int]) -> DeviceMesh:
    """A mesh with ``axes``, of the groups of ``ctx`` where these are its axes. Collective at the first call."""
    if not isinstance(ctx.backend, C10dBackend):
        raise BackendError(
            f"a DeviceMesh needs a backend over torch.distributed, and {type(ctx.backend).__name__} is none: for "
            "dtensor_state_dict use tpcore.checkpoint, for generate_batch use generate"
        )
    known, key = ctx.backend.device_meshes, tuple(axes.items())
    if key not in known:
        grid, kind, names = torch.arange(ctx.mesh.size).view(*axes.values()), ctx.device.type, tuple(axes)
        if all(a in ctx.mesh.axes for a in names):
            groups = [ctx.comm(a).process_group for a in names]
            known[key] = DeviceMesh.from_group(groups, kind, mesh=grid, mesh_dim_names=names)
        else:
            known[key] = DeviceMesh(kind, grid, mesh_dim_names=names)
    device_mesh: DeviceMesh = known[key]
    return device_mesh
