"""The process group of torch.distributed for the stand-in: gloo's collectives, where Neuron's limits allow them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tpcore.c10d.transport import joined, members_chunks

from . import compiler
from .device import NAME, DeviceTensor, StandInDevice, install, raw
from .limits import Refusals
from .private import group_named, tree_leaves, tree_map

_Base: Any = dist.ProcessGroup


class _Rounded(dist.Work):
    """A reduction that rounds memory when it is waited for."""

    def __init__(self, work: Any, wide: list[Tensor], device: StandInDevice) -> None:
        super().__init__()
        self._work, self._wide, self._device = work, wide, device

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        self._round()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        def end(done: Any) -> Any:
            found = done.wait()
            self._round()
            return found

        return self._work.get_future().then(end)

    def _round(self) -> None:
        for x in self._wide:
            with torch.inference_mode(x.is_inference()):
                self._device.narrow(x, "whole_sums", self._device.limits.sums)
                self._device.narrow(x)


class LimitedGroup(_Base):  # type: ignore[misc]  # its stubs do not say what torch calls
    """Over gloo, in Python as AWS's own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._device = install()
        self._device.limits.refuse("early_device", self._device.touched and not self._device.ready)
        self._device.ready = True
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        # which has the group's name, and says where torch.distributed puts the bytes of objects
        self._register_backend(torch.device(NAME), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        return NAME

    def _call(self, name: str, *args: Any) -> Any:
        """Gloo's ``name`` on the tensors' memory."""
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        limits = self._device.limits
        limits.refuse("empty", any(not x.numel() for x in tensors), f"{name} of shape {[*map(_shape, tensors)]}")
        limits.refuse("other_device", any(not isinstance(x, DeviceTensor) for x in tensors), name)
        return getattr(self._gloo, name)(*tree_map(raw, args))

    def _reduce(self, name: str, out: Any, *args: Any) -> Any:
        """``_call``, and ``out`` is rounded at its end: a sum may need more bits than its terms."""
        work, limits = self._call(name, out, *args), self._device.limits
        wide = [x for x in map(raw, tree_leaves(out)) if x.dtype in {**limits.narrow, **limits.sums}]
        return _Rounded(work, wide, self._device) if wide else work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._reduce("allreduce", _listed(tensors), opts or c10d.AllreduceOptions())

    def _allgather_base(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        # flat: torch takes joined rows and rows in a new first dim, and gloo the first alone
        return self._call("_allgather_base", out.view(-1), x.contiguous().view(-1), opts or c10d.AllgatherOptions())

    def allgather(self, outs: Any, xs: Any, opts: Any = None) -> Any:
        return self._call("allgather", outs, xs, opts or c10d.AllgatherOptions())

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        flat = out.view(-1), x.contiguous().view(-1)
        return self._reduce("_reduce_scatter_base", *flat, opts or c10d.ReduceScatterOptions())

    def reduce_scatter(self, outs: Any, xs: Any, opts: Any = None) -> Any:
        return self._reduce("reduce_scatter", outs, xs, opts or c10d.ReduceScatterOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.BroadcastOptions()
        if "signed_zeros" not in self._device.limits.names:
            return self._call("broadcast", tensors, opts)
        if self.rank() != opts.rootRank:
            for x in tensors:
                x.detach().zero_()
        return self._reduce("allreduce", tensors, c10d.AllreduceOptions())

    def gather(self, outs: Any, xs: Any, opts: Any = None) -> Any:
        return self._call("gather", outs, xs, opts or c10d.GatherOptions())

    def scatter(self, outs: Any, xs: Any, opts: Any = None) -> Any:
        return self._call("scatter", outs, xs, opts or c10d.ScatterOptions())

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._reduce("reduce", _listed(tensors), opts or c10d.ReduceOptions())

    def alltoall_base(self, out: Tensor, x: Tensor, received: Any, sent: Any, opts: Any = None) -> Any:
        sizes = [*(received or ()), *(sent or ())]
        if x.numel() or sizes:
            self._device.limits.exchange(dist.get_process_group_ranks(self), sizes)
        return self._call("alltoall_base", out, x, received or [], sent or [], opts or c10d.AllToAllOptions())

    def alltoall(self, outs: Any, xs: Any, opts: Any = None) -> Any:
        received, sent = ([x.numel() for x in parts] for parts in (outs, xs))
        sizes = [*received, *sent]
        self._device.limits.exchange(dist.get_process_group_ranks(self), sizes if len({*sizes}) > 1 else [])
        # gloo has the flat one only
        whole = torch.cat([raw(x).reshape(-1) for x in xs])
        flat = DeviceTensor(whole.new_empty(sum(received))), DeviceTensor(whole)
        self._call("alltoall_base", *flat, received, sent, c10d.AllToAllOptions()).wait()
        for out, row in zip(outs, raw(flat[0]).split(received), strict=True):
            raw(out).copy_(row.view(out.shape))
        return self._gloo.barrier()

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._reduce("allreduce_coalesced", tensors, opts or c10d.AllreduceCoalescedOptions())

    def all_gather_single_coalesced(self, outs: Any, xs: Any, opts: Any = None) -> None:
        for out, x in zip(outs, xs, strict=True):
            self._allgather_base(out, x, opts).wait()

    def reduce_scatter_single_coalesced(self, outs: Any, xs: Any, opts: Any = None) -> None:
        for out, x in zip(outs, xs, strict=True):
            self._reduce_scatter_base(out, x, opts).wait()

    # by these names torch.distributed's functions call them
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        ranks = dist.get_process_group_ranks(self)
        self._device.limits.refuse("barrier", dist.get_world_size() != self.size(), f"ranks {ranks}")
        return self._gloo.barrier()

    def send(self, tensors: Any, *args: Any) -> Any:
        self._device.limits.refuse("send_recv", True, f"send of shape {_shape(tensors[0])}")
        return self._call("send", tensors, *args)

    def recv(self, tensors: Any, *args: Any) -> Any:
        self._device.limits.refuse("send_recv", True, f"recv of shape {_shape(tensors[0])}")
        return self._call("recv", tensors, *args)


def functional(operator: Any, x: Any, *args: Any) -> Any:
    """A functional collective, or DTensor's exchange, on memory. It has ended on return: waiting does nothing."""
    if not args:
        return x  # a wait, or a wrapper of torch's
    if isinstance(x, list):  # coalesced
        return [functional(operator, one, *args) for one in x]
    name = operator.overloadpacket.__name__
    out = _collective(name.rstrip("_").removesuffix("coalesced").rstrip("_"), x.contiguous(), *args)
    return x.copy_(out) if name.endswith("_") else out


def _collective(kind: str, x: Tensor, *args: Any) -> Tensor:
    *how, name = args
    pg = group_named(name)
    if kind in ("all_reduce", "broadcast"):
        out = DeviceTensor(x.clone())
        if kind == "broadcast":
            dist.broadcast(out, group=pg, group_src=how[0])
        else:
            dist.all_reduce(out, getattr(dist.ReduceOp, how[0].upper()), pg)
    elif kind == "all_gather_into_tensor":
        out = DeviceTensor(x.new_empty((len(x) * pg.size(), *x.shape[1:])))
        pg._allgather_base(out, DeviceTensor(x)).wait()
    elif kind == "all_to_all_single":
        out = DeviceTensor(x.new_empty((sum(how[0]) if how[0] else len(x), *x.shape[1:])))
        pg.alltoall_base(out, DeviceTensor(x), *how).wait()
    elif kind == "shard_dim_alltoall":
        sent = members_chunks(x, how[1], pg.size())
        out = DeviceTensor(torch.empty_like(sent))
        pg.alltoall_base(out, DeviceTensor(sent), [], []).wait()
        return joined(out.raw, how[0])
    elif kind == "reduce_scatter_tensor":
        out, over = DeviceTensor(x.new_empty((len(x) // pg.size(), *x.shape[1:]))), c10d.ReduceScatterOptions()
        over.reduceOp = getattr(dist.ReduceOp, how[0].upper())
        pg._reduce_scatter_base(out, DeviceTensor(x), over).wait()
    else:
        raise NotImplementedError(f"{NAME} (stand-in) has no functional {kind}: take tpcore's Comm")
    return out.raw


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def register(names: frozenset[str]) -> None:
    """Make the device ``neuron`` and the backend of that name for torch.distributed, under the limits of ``names``."""
    install().limits = Refusals(names)
    if not hasattr(dist.Backend, NAME.upper()):
        compiler.register()
        install().functional = functional
        dist.Backend.register_backend(NAME, LimitedGroup, devices=[NAME])
