"""The collectives of one group, on gloo's own process group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpcore.c10d.transport import REDUCE, C10dTransport, copied
from tpcore.transport import ALL_REDUCE, CPU, REDUCE_SCATTER, Op


class GlooTransport(C10dTransport):
    """``pg`` is a torch.distributed group; its calls go to gloo's object inside, past the dispatcher and
    past torch.distributed's wrappers, which cost more than our layers do (7 to 15 us a call)."""

    def _handle(self, pg: Any) -> Any:
        return pg._get_backend(CPU)

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if x.dtype not in self.native:
            return self.start_all_reduce(x, op, donate)()
        self._enter(ALL_REDUCE.describe(op), x)
        out = x if donate and x.is_contiguous() else copied(x)
        self._finish(self._calls.allreduce([out], REDUCE[op]))
        return out

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """All-to-all, then a local sum: half the traffic of gloo's own, which all-reduces (measured with
        4 ranks on 4 MB: 4.2 ms, against 12.1 for gloo's and 9.4 for all-reduce and narrow)."""
        self._enter(REDUCE_SCATTER.describe(dim), x)
        return self._exchanged(self._chunks(x, dim)).sum(0, dtype=x.dtype)
