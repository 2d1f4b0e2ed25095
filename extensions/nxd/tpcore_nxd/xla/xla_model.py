"""Devices, steps, collectives, means of gradients and files, as torch_xla's ``xla_model`` has them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import chain, combinations
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpcore import nested
from tpcore.comm.comm import Comm
from tpcore.layout.mesh import BATCH, DATA
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import ParallelContext, current, is_initialized
from tpcore.runtime.init import init
from tpcore.train.step import stepping_of

from .. import utils
from ..optimizer import NeuronZero1Optimizer
from ..utils import master_print
from .runtime import global_ordinal as get_ordinal
from .runtime import local_ordinal as get_local_ordinal
from .runtime import world_size

__all__ = ["REDUCE_AND", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_MUL", "REDUCE_OR", "REDUCE_SUM", "add_step_closure"]
__all__ += ["all_gather", "all_reduce", "checkpoint", "get_local_ordinal", "get_ordinal", "is_master_ordinal"]
__all__ += ["mark_step", "master_print", "mesh_reduce", "optimizer_step", "reduce_gradients", "rendezvous", "save"]
__all__ += ["wait_device_ops", "xla_device", "xrt_world_size"]

T = TypeVar("T")
Groups = list[list[int]] | None

REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "sum", "mul", "and", "or", "min", "max"

_BY_PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    REDUCE_MUL: torch.mul,
    REDUCE_AND: torch.bitwise_and,
    REDUCE_OR: torch.bitwise_or,
    REDUCE_MIN: torch.minimum,
}


# -- where this process is -----------------------------------------------------------------------------------
def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """This rank's device, whatever the backend."""
    if n:
        raise ValueError(f"xla_device({n}): a process has one device, number 0")
    return utils.get_device()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first rank of its host; ``local=False``: of the job."""
    return (get_local_ordinal() if local else get_ordinal()) == 0


def xrt_world_size(defval: int = 1) -> int:
    """The number of processes."""
    return world_size()


# -- steps ---------------------------------------------------------------------------------------------------
def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End of a step, which on most backends does nothing."""
    utils.mark_step()


def wait_device_ops(devices: Sequence[str] = ()) -> None:
    """Nothing: what reads a value waits for it."""


def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """``closure(*args)``, at once."""
    closure(*args)


def checkpoint(function: Callable[..., T], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> T:
    """``torch.utils.checkpoint.checkpoint``."""
    recomputed: Callable[..., T] = torch.utils.checkpoint.checkpoint
    return recomputed(function, *args, use_reentrant=use_reentrant, **kwargs)


# -- collectives ---------------------------------------------------------------------------------------------
def _context() -> ParallelContext:
    """The context. A script without NeuronX Distributed initializes nothing: all its ranks are dp ranks."""
    return current() if is_initialized() else init()


def _comm(groups: Groups) -> Comm:
    """The group of this rank in ``groups``; None or empty: all ranks."""
    ctx = _context()
    if not groups:
        return ctx.world
    mesh, wanted = ctx.mesh, sorted([int(rank) for rank in ranks] for ranks in groups)
    for axes in chain.from_iterable(combinations(mesh.axes, n) for n in range(len(mesh.axes) + 1)):
        if sorted(mesh.group(*axes).as_list()) == wanted:
            return ctx.comm(*axes)
    if sorted(chain(*wanted)) != [*range(mesh.size)] or len({*map(len, wanted)}) > 1:
        raise ValueError(f"groups={groups} have to be of one size, and to have each of the {mesh.size} ranks once")
    return ctx.grouped(f"groups {wanted}", tuple(map(tuple, wanted)))


def _reduced(kind: str, x: Tensor, scale: float, comm: Comm) -> Tensor:
    if kind in ("sum", "max"):
        total = comm.all_reduce(x.clone(), kind, donate=True)  # type: ignore[arg-type]
    elif kind in _BY_PAIRS:
        if kind in (REDUCE_AND, REDUCE_OR) and (x.is_floating_point() or x.is_complex()):
            raise TypeError(
                f"all_reduce({kind!r}) is of bits, and {x.dtype} has none to reduce: pass x != 0, or use min or max"
            )
        total = functools.reduce(_BY_PAIRS[kind], comm.all_gather(x[None], 0).unbind())
    else:
        raise ValueError(f"a reduction is one of sum, max, {', '.join(_BY_PAIRS)}, not {kind!r}")
    return total if scale == 1.0 else (total * scale).to(x.dtype)


@torch.no_grad()
def all_reduce(
    reduce_type: str, inputs: Tensor | list[Tensor], scale: float = 1.0, groups: Groups = None, pin_layout: bool = True
) -> Tensor | list[Tensor]:
    """The reduction of a tensor over its group, times ``scale``; of a list, in place, and the list."""
    comm = _comm(groups)
    if isinstance(inputs, Tensor):
        return _reduced(reduce_type, inputs, scale, comm)
    for x in inputs:
        x.copy_(_reduced(reduce_type, x, scale, comm))
    return inputs


@torch.no_grad()
def all_gather(
    value: Tensor,
    dim: int = 0,
    groups: Groups = None,
    output: Tensor | None = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> Tensor:
    """The members' tensors along ``dim``, in order of the group; into ``output``, where there is one."""
    gathered = _comm(groups).all_gather(value, dim)
    return gathered.clone() if output is None else output.copy_(gathered)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] | None = None) -> list[bytes]:
    """Wait for all ranks; the payloads of each. ValueError for ``replicas`` that are not all of them."""
    if not isinstance(payload, bytes):
        raise TypeError(f"rendezvous(payload={payload!r}) sends bytes: pass text.encode(), or pickle.dumps(value)")
    if replicas and sorted(replicas) != [*range(world_size())]:
        raise ValueError(f"rendezvous(replicas={list(replicas)}): all {world_size()} ranks meet; leave it out")
    return gather_bytes(payload, _context().world) if world_size() > 1 else [payload]


def mesh_reduce(tag: str, data: T, reduce_fn: Callable[[list[T]], Any]) -> Any:
    """``reduce_fn`` of a list with the ``data`` of every rank. Only bytes of this job's own ranks are unpickled."""
    return reduce_fn([pickle.loads(sent) for sent in rendezvous(tag, pickle.dumps(moved(data, "cpu")))])


# -- training ------------------------------------------------------------------------------------------------
def reduce_gradients(optimizer: Any, groups: Groups = None, pin_layout: bool = True) -> None:
    """The mean of the gradients over dp, which is what ``groups`` have to be, with cp or without, where they are given.
    ZeRO-1 takes it in its step."""
    mesh = _context().mesh
    known = [mesh.group(*mesh.present(axes)).as_list() for axes in (DATA, BATCH)]
    if groups and sorted(map(sorted, groups)) not in [sorted(map(sorted, ranks)) for ranks in known]:
        raise ValueError(f"gradients are a mean over dp, groups={known[0]}, not {groups}: leave groups out")
    if not isinstance(optimizer, NeuronZero1Optimizer):
        stepping_of(optimizer).reduce_gradients()


def optimizer_step(
    optimizer: Any,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """``reduce_gradients``, then the optimizer's own step, whose result it returns; ``barrier``: the step ends."""
    reduce_gradients(optimizer, groups)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


# -- files ---------------------------------------------------------------------------------------------------
def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """``torch.save``, with tensors on the CPU, of the first rank of each host; ``global_master``: of the job.

    ValueError for tensors where tp, pp or ep gives each rank others: one rank's would pass for the whole.
    """
    mesh = current().mesh.axes if is_initialized() else {}
    shared = {axis: size for axis, size in mesh.items() if axis in ("tp", "pp", "ep") and size > 1}
    if shared and master_only and _has_tensors(data):
        raise ValueError(
            f"save(master_only=True) with {shared}: one rank's tensors are a part of the model. "
            "tpcore_nxd.parallel_layers.checkpointing.save writes the whole; master_only=False each rank's own file"
        )
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(moved(data, "cpu"), file_or_path)


class _Tensors(pickle.Pickler):
    """Whether there are any in what it pickles, in objects of whatever class."""

    found = False

    def persistent_id(self, obj: Any) -> bool | None:
        self.found |= isinstance(obj, Tensor)
        return isinstance(obj, Tensor) or None


def _has_tensors(data: Any) -> bool:
    pickler = _Tensors(BytesIO())
    pickler.dump(data)
    return pickler.found


def moved(data: Any, device: Any) -> Any:
    """``data`` with its tensors, and what else has a ``to``, on ``device``: batches and states, to any depth."""

    def there(leaf: Any) -> Any:  # a module's own `to` would change it
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, torch.nn.Module) else leaf

    return nested.mapped(there, data, object)
