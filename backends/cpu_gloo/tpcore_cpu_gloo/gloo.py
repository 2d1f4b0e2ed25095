"""The collectives of one group, on gloo's own process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcore.c10d.comm import ALL_REDUCE, C10dComm, copied
from tpcore.comm import Op

_CPU = torch.device("cpu")
_ALL_TO_ALL = dist.AllToAllOptions()


class GlooComm(C10dComm):
    """``pg`` is a torch.distributed group; its calls go to gloo's object inside, past the dispatcher and
    past torch.distributed's wrappers, which cost more than our layers do (7 to 15 us a call)."""

    def _handle(self, pg: Any) -> Any:
        return pg._get_backend(_CPU)

    def _all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if x.dtype not in self.native:
            return self._start_all_reduce(x, op, donate)()
        self._enter(f"all_reduce {op}", x)
        out = x if donate and x.is_contiguous() else copied(x)
        self._finish(self._calls.allreduce([out], ALL_REDUCE[op]))
        return out

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """All-to-all, then a local sum: half the traffic of gloo's own, which all-reduces (measured with
        4 ranks on 4 MB: 4.2 ms, against 12.1 for gloo's and 9.4 for all-reduce and narrow)."""
        self._check_reducible(x, "sum")
        self._enter(f"reduce_scatter dim {dim}", x)
        sent = self._chunks(x, dim)
        got = torch.empty_like(sent)
        self._finish(self._calls.alltoall_base(self._wire(got), self._wire(sent), [], [], _ALL_TO_ALL))
        return got.sum(0, dtype=x.dtype)
