"""The collectives of one group, on gloo's own process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcore.comm import Comm, Op, Pending
from tpcore.mesh import Group


def _options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_REDUCE = {"sum": _options(dist.ReduceOp.SUM), "max": _options(dist.ReduceOp.MAX)}


class GlooComm(Comm):
    """Collectives over ``pg``, a torch.distributed group whose ranks are ``group``'s members."""

    def __init__(self, group: Group, position: int, pg: Any) -> None:
        super().__init__(group, torch.tensor([position]))
        self._pg = pg

    @property
    def process_group(self) -> Any:
        return self._pg

    def _all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return self._start_all_reduce(x, op, donate)()

    def _start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out = x.detach() if donate and x.is_contiguous() else x.detach().clone(memory_format=torch.contiguous_format)
        work = self._pg.allreduce([out], _REDUCE[op])

        def wait() -> Tensor:
            work.wait()
            return out

        return wait

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.detach().contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._pg._allgather_base(out, x).wait()
        if dim == 0:
            return out
        return torch.cat(out.chunk(self.size), dim)

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.split(self._all_reduce(x, "sum", False), dim)
