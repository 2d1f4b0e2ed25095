"""The collectives of one group, on gloo's own process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpcore.c10d.supervision.waiting import Waiting
from tpcore.c10d.transport import REDUCE, C10dTransport, copied
from tpcore.comm.transport import ALL_REDUCE, CPU, REDUCE_SCATTER, Op


class GlooTransport(C10dTransport):
    """The collectives of a torch.distributed group. They call its gloo object directly: the dispatcher and
    torch.distributed's wrappers cost more than our layers (7 to 15 us a call)."""

    def __init__(self, *group: Any, why: str) -> None:
        """``why``: the reason why the group does not use shared memory."""
        super().__init__(*group)
        self._why = why

    def __repr__(self) -> str:
        return f"gloo ({self._why})"

    def _handle(self, pg: Any) -> Any:
        return pg._get_backend(CPU)

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if x.dtype not in self.native or (op == "max" and x.is_floating_point()):
            return self.start_all_reduce(x, op, donate)()
        self._enter(ALL_REDUCE.describe(op), x)
        out = x if donate and x.is_contiguous() else copied(x)
        self._finish(self._calls.allreduce([out], REDUCE[op]))
        return out

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """All-to-all, then a local sum: half the traffic of gloo's reduce-scatter, which all-reduces.
        Measured with 4 ranks on 4 MB: 4.2 ms, against 12.1 for gloo's and 9.4 for all-reduce and narrow."""
        self._enter(REDUCE_SCATTER.describe(dim), x)
        return self._exchanged(self._chunks(x, dim)).sum(0, dtype=x.dtype)


def exchanged(pg: Any, waiting: Waiting, text: str) -> list[str]:
    """Gather the members' texts, of up to 255 bytes each."""
    size = len(waiting.members)
    sent = torch.frombuffer(bytearray(text.encode()[:255].ljust(256, b"\0")), dtype=torch.uint8)
    got = torch.empty(256 * size, dtype=torch.uint8)
    waiting.finish(pg._get_backend(CPU)._allgather_base(got, sent))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in got.view(size, 256)]
