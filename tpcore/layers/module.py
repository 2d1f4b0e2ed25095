"""Base of every parallel layer: parameters are declared by spec, allocated and initialised here."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Comm
from ..context import current
from ..layout import Layout, Slot
from ..shard import ShardSpec
from .initial import Init, initial_part
from .sharding import Sharding, stamp

Device = torch.device | str | bool | None
"""Where to allocate. False is a published default of NxD's RowParallelLinear; it means None."""


class ParallelModule(nn.Module):
    """Owns ``shard_specs``, the single source of truth on how its parameters are cut.

    torch drops attributes of a Parameter in ``deepcopy``, ``load_state_dict(assign=True)``, ``to("meta")``
    and ``to("xla")``; a dict on the module survives all of these. So parameters are stamped from it again
    wherever torch may have replaced them.
    """

    shard_specs: dict[str, ShardSpec]  # by local parameter name
    slot: Slot | None = None
    """The one coordinate of an axis at which the parameters live, as those of a pipeline stage do."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        ctx = current()
        self.tp: Comm = ctx.comm_for(group)
        self.checks = ctx.checks if self.tp.size > 1 else None
        self._lies_on, self._axes = ctx.over(self.tp)
        self._dtypes = (*ctx.backend.capabilities.dtypes, *ctx.backend.capabilities.moved)
        members = self.tp.group.members(ctx.rank)
        self._tp_rank = members.index(ctx.rank)  # host side: initial values only
        self.shard_specs = {}
        self._inits: dict[str, Init] = {}

    def shard_parameter(
        self, name: str, spec: ShardSpec, init: Init, dtype: torch.dtype, device: Device
    ) -> None:
        """Register this rank's shard, with the values that ``init`` gives the unsharded tensor.

        ValueError for a dtype that the backend does not declare, unless this group is of one rank.
        """
        if self.tp.size > 1 and dtype not in self._dtypes:
            known = ", ".join(map(str, self._dtypes))
            raise ValueError(f"{type(self).__name__}.{name} of {dtype}: this backend computes on {known}")
        # empty((0,)): asks torch which device is meant, a `with torch.device(...)` block included
        where = torch.empty((0,), device=None if isinstance(device, bool) else device).device
        if where.type != "meta":
            self.look_alike(f"the random state that {name} starts from", torch.get_rng_state())
        self.shard_specs[name], self._inits[name] = spec, init
        if where.type == "meta":
            local = torch.empty(spec.local_shape(self.tp.size), dtype=dtype, device=where)
        else:
            local = self._initial(name, dtype).to(where)
        self.register_parameter(name, nn.Parameter(local))
        self._stamp_all()

    def _initial(self, name: str, dtype: torch.dtype) -> Tensor:
        on, layout = self._lies_on, Layout.of(self.shard_specs[name], *self._axes)
        return initial_part(self._inits[name], layout, on.rank, on.mesh, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill this rank's shards anew, as the constructor does: after ``to_empty`` of a module that was made
        on meta, say. Draws the same random numbers on every rank."""
        for name in self.shard_specs:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.copy_(self._initial(name, parameter.dtype))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name in self.shard_specs:  # a new one in its place, as `layer.weight = ...` puts it
            self._stamp_all()

    def look_alike(self, what: str, t: Tensor) -> None:
        """In a checked run, note ``t``, which the ranks of the tp group should have alike."""
        if self.checks is not None and self._axes == ("tp",):
            self.checks.same(f"{what} of {type(self).__name__}", t)

    def as_part(self, y: Tensor, dim: int, kind: str) -> Tensor:
        """In a checked run, ``y`` as this rank's part along ``dim``: of ``features`` or ``tokens``."""
        return y if self.checks is None else self.checks.part(y, self.tp, dim, kind)

    def comm_within(self, count: int) -> Comm:
        """Over runs of ``count`` consecutive ranks of this layer's group, which hold the same. Collective."""
        if not set(self._axes) <= set(current().mesh.axes):
            raise ValueError(
                f"{type(self).__name__}: {count} ranks each hold the same part, and groups of such ranks are "
                f"known on the mesh only: pass a group of mesh axes {list(current().mesh.axes)}"
            )
        return self._lies_on.comm(*self._axes, within=count)

    def sharding_of(self, name: str) -> Sharding:
        """How the parameter ``name`` lies on the mesh."""
        return Sharding(Layout.of(self.shard_specs[name], *self._axes, slot=self.slot), self._lies_on)

    def place(self, slot: Slot) -> None:
        """Let the parameters count as living at one coordinate of an axis only."""
        self.slot = slot
        self._stamp_all()

    def _stamp_all(self) -> None:
        for name in self.shard_specs:
            parameter = self._parameters.get(name)
            if parameter is not None:
                stamp(parameter, self.sharding_of(name))

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        super()._apply(fn, recurse)
        self._stamp_all()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._stamp_all()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stamp_all()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.shard_specs:
            if prefix + name in destination:
                stamp(destination[prefix + name], self.sharding_of(name))

    def _shapes(self) -> str:
        """For ``extra_repr``: logical and local shape of the weight."""
        spec, n = self.shard_specs["weight"], self.tp.size
        return f"weight={tuple(spec.shape)}, local={spec.local_shape(n)}, tp={n}"


def move_model_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """``model.to(device)`` that keeps every Parameter the object it is, its ties and its attributes.

    On devices whose tensors cannot take the place of the CPU's, such as XLA, ``to`` makes new Parameters:
    here the old ones get their contents. So an optimizer that was made before goes on with them, if it has
    no state yet. A parameter to which something holds a weak reference becomes a new object all the same,
    as torch cannot exchange its contents.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    before: dict[int, tuple[nn.Parameter, dict[str, Any]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                places[id(p)].append((module, name))
                before[id(p)] = p, dict(p.__dict__)
    model.to(device)
    for key, owners in places.items():
        first_owner, first_name = owners[0]
        made, (parameter, attributes) = first_owner._parameters[first_name], before[key]
        if made is not None and made is not parameter:
            if weakref.getweakrefcount(parameter):
                parameter = made
            else:
                torch.utils.swap_tensors(parameter, made)
        for owner, name in owners:
            owner._parameters[name] = parameter
        parameter.__dict__.update(attributes)
    return model
