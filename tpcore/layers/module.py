"""Base class of parallel layers, which allocates and initialises parameters by specs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.comm import Comm
from ..layout.layout import Layout, Slot
from ..layout.shard import ShardSpec
from ..nested import is_plain
from ..runtime.context import current
from ..runtime.digests import compare_inputs
from .initial import Init
from .sharding import Sharding, stamp, stamped

Device = torch.device | str | None


class ParallelModule(nn.Module):
    """Owns ``shard_specs``, the single source of truth for the sharding of its parameters: torch drops attributes of a
    Parameter in ``deepcopy``, ``load_state_dict(assign=True)``, ``to("meta")`` and ``to("xla")``, so parameters are
    stamped from this dict again after each of them."""

    shard_specs: dict[str, ShardSpec]  # by local parameter name
    slot: Slot | None = None
    """The one coordinate of an axis at which the parameters exist, for a pipeline stage."""
    plain_type: type[nn.Module] = nn.Module
    """The kind of module that it stands for, and with the whole parameters would be."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        ctx = current()
        self.tp: Comm = ctx.comm_for(group)
        self.observer = ctx.observer if self.tp.size > 1 else None
        self._layout_ctx, self._axes = ctx.over(self.tp)
        self._dtypes = (*ctx.backend.capabilities.dtypes, *ctx.backend.capabilities.moved)
        members = self.tp.group.members(ctx.rank)
        self._tp_rank = members.index(ctx.rank)  # a Python number: for initial values only
        self._count()
        self.shard_specs = {}
        self._inits: dict[str, Init] = {}

    def _count(self) -> None:
        """Number this layer among those on its group: ranks in different layers are told apart by it."""
        self.tp.layers += 1
        self._number = self.tp.layers
        self.known()

    def known(self) -> None:
        """Let the guards of this job know of this layer, of which other ranks have other parameters."""
        self._layout_ctx.layers.add(self)

    @property
    def numbered(self) -> tuple[int, int]:
        """This layer's number among the layers that this process has made on the group, and their count."""
        return self._number, self.tp.layers

    def shard_parameter(
        self, name: str, spec: ShardSpec, init: Init, dtype: torch.dtype | None = None, device: Device = None
    ) -> None:
        """Register this rank's shard, with the values that ``init`` gives the unsharded tensor. ``dtype``: None is
        torch's default; ValueError for one that the backend does not declare, on more than one rank."""
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.tp.size > 1 and dtype not in self._dtypes:
            supported = ", ".join(map(str, self._dtypes))
            raise ValueError(f"{type(self).__name__}.{name} of {dtype}: this backend computes on {supported}")
        # empty((0,)) finds torch's default device, including that of a `with torch.device(...)` block
        where = torch.empty((0,), device=device).device
        if where.type != "meta" or self._layout_ctx.device.type == "meta":  # of a recorded step, and the run has values
            self.look_alike(f"the random state for the initial {name}", torch.get_rng_state())
        self.shard_specs[name], self._inits[name] = spec, init
        if where.type == "meta":
            local = torch.empty(spec.local_shape(self.tp.size), dtype=dtype, device=where)
        else:
            local = self._initial(name, dtype).to(where)
        self.register_parameter(name, nn.Parameter(local))
        self._stamp_all()

    def _initial(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.sharding_of(name).initial(self._inits[name], dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill this rank's shards anew, as the constructor does: after ``to_empty`` of a module that was made
        on meta, say. Draws the same random numbers on every rank."""
        for name in self.shard_specs:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.copy_(self._initial(name, parameter.dtype))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and name in self.shard_specs:
            if not is_plain(param):  # a quantizer's, for it finds a sharded head to be an nn.Linear
                raise ValueError(
                    f"{type(self).__name__}.{name} cannot become a {type(param).__name__}, of this rank's part: "
                    "quantize before the model is sharded"
                )
            spec, shape, local = self.shard_specs[name], tuple(param.shape), tuple(self.sharding_of(name).local_shape)
            if shape != local:  # with the whole on each rank a sum over the ranks would be tp times too large
                raise ValueError(
                    f"{type(self).__name__}.{name} is this rank's part of {tuple(spec.shape)}, of shape {local}, and "
                    f"not {shape}: of whole values give part_of({name!r}, whole)"
                )
        super().register_parameter(name, param)
        if name in self.shard_specs:  # a replacement, by `layer.weight = ...`
            self._stamp_all()

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> Any:
        if getattr(self, "input_is_copied", False) and self.tp.size > 1:
            raise ValueError(
                f"{self}: a backward hook would see this rank's part of a sum, the gradient of an input that several "
                "layers share: register it on the module around it"
            )
        return super().register_full_backward_hook(hook, prepend)

    def look_alike(self, what: str, t: Tensor) -> None:
        """Tell the observer of ``t``, which must be the same on all ranks of the tp group."""
        # a lazy backend would run a program for each value that is read
        if self.observer is not None and self.tp.eager and self._axes == ("tp",):
            self.observer.same(f"{what} of {type(self).__name__}", t)

    def look_alike_first(self, what: str, t: Tensor) -> None:
        """``look_alike`` of what comes from the program, which is also compared at once in the first calls."""
        if not torch.compiler.is_compiling():
            self.look_alike(what, t)
            self.tp.entrance = self.tp.entrance or self._number
            compare_inputs({f"{what} of {type(self).__name__}": t}, self.tp, self._number)

    def as_part(self, y: Tensor, dim: int, kind: str) -> Tensor:
        """``y``, this rank's part along ``dim``, as the observer returns it. ``kind``: features or tokens."""
        return y if self.observer is None else self.observer.part(y, self.tp, dim, kind)

    @property
    def reproducible(self) -> int | None:
        """The context's. ValueError where the group's sums cannot be in its order."""
        most = self._layout_ctx.reproducible
        if most is not None and not self.tp.blocks:
            raise ValueError(
                f"{type(self).__name__}: with reproducible={most} sums are over groups of a power of two of ranks up "
                f"to {most}, and its group has {self.tp.size}: take such a group, or a larger number in tpcore.init"
            )
        return most

    def comm_within(self, count: int) -> Comm:
        """The Comm over runs of ``count`` consecutive ranks of this layer's group, which hold the same part.
        A collective call."""
        if not set(self._axes) <= set(current().mesh.axes):
            raise ValueError(
                f"{type(self).__name__}: {count} ranks each hold the same part, and groups of such ranks are "
                f"known on the mesh only: pass a group of mesh axes {list(current().mesh.axes)}"
            )
        return self._layout_ctx.comm(*self._axes, within=count)

    def layout_of(self, name: str) -> Layout:
        """The layout of parameter ``name``."""
        return Layout.of(self.shard_specs[name], *self._axes, slot=self.slot)

    def sharding_of(self, name: str) -> Sharding:
        """The sharding of parameter ``name`` on the mesh."""
        return Sharding(self.layout_of(name), self._layout_ctx)

    def part_of(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of ``full``, the values of parameter ``name`` on all ranks."""
        return self.layout_of(name).shard(full, self._layout_ctx.rank, self._layout_ctx.mesh)

    def place(self, slot: Slot) -> None:
        """Declare that the parameters exist at one coordinate of an axis only."""
        self.slot = slot
        self._stamp_all()

    def _stamp_all(self) -> None:
        for name in self.shard_specs:
            parameter = self._parameters.get(name)
            if parameter is not None:
                self.stamp(parameter, name)

    def stamp(self, tensor: Tensor, name: str) -> None:
        """Store the sharding of parameter ``name`` on ``tensor``."""
        stamp(tensor, self.sharding_of(name))

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        super()._apply(fn, recurse)
        self._stamp_all()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in self.shard_specs:  # of a checkpoint that was loaded whole each rank takes its part
            given, place = state_dict.get(prefix + name), self.sharding_of(name)
            if given is not None and tuple(place.local_shape) != tuple(given.shape) == tuple(place.layout.shape):
                state_dict[prefix + name] = self.part_of(name, given)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._stamp_all()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._count()
        self._stamp_all()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.shard_specs:
            # with ``keep_vars`` the parameter itself, which has its stamp, unless torch has swapped its contents
            if prefix + name in destination and not (keep_vars and stamped(destination[prefix + name])):
                self.stamp(destination[prefix + name], name)

    @property
    def sides(self) -> tuple[Any, Any]:
        """The ``Features`` that enter and leave in the current forward; None: each rank has all."""
        return None, None

    @property
    def qconfig(self) -> Any:
        """What quantizers of torch set on each module of a model, before they change those that they know."""
        raise AttributeError

    @qconfig.setter
    def qconfig(self, _: Any) -> None:
        raise ValueError(
            f"torch.ao quantizes modules that it knows, and no {type(self).__name__}: it would leave the sharded "
            "layers as they are, so sharded models are not quantized"
        )

    def _shapes(self) -> str:
        """Unsharded and local shape of the weight, for ``extra_repr``."""
        spec, n = self.shard_specs["weight"], self.tp.size
        return f"weight={tuple(spec.shape)}, local={spec.local_shape(n)}, tp={n}"


def move_model_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """``model.to(device)`` that keeps the Parameter objects, their ties and their attributes.

    On some devices, such as XLA, ``to`` makes new Parameters, of which the old ones get the contents here: an
    optimizer that was made before remains valid, if it has no state yet. A parameter with a weak reference to it
    still becomes a new object, because torch cannot swap its contents.
    """
    owned = [
        (module, name, p, dict(vars(p)))
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]
    model.to(device)
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, p, attributes in owned:
        if p not in replacements:
            moved: Any = module._parameters[name]  # get_parameter takes no plain tensor, which libraries put there
            if moved is not p and not weakref.getweakrefcount(p):
                torch.utils.swap_tensors(p, moved)
                moved = p
            vars(moved).update(attributes)
            replacements[p] = moved
        module._parameters[name] = replacements[p]
    return model
