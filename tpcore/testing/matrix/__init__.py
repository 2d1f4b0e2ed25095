"""The correctness matrix: every layer under every option against the plain torch module, on any backend.

A row has the cases of one layer. A case is data and its check is a function of (ctx, case), so the same cases run on
threads, on processes and on compiled replicas. Each check builds the plain module with the same seed, once in the
case's dtype (the initial values must agree) and once in float64, gives both the same inputs, and compares this rank's
part of the output and of every gradient with an elementwise error bound.

The bounds are those of Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: a sum of K products
computed in any order is off by at most about ``K u sum |products|``, u being the unit roundoff of the accumulator, and
each rounding of the result to the storage dtype adds its own u. So a bound is ``A * (roundings * u + 2 * K * u_acc)``
with ``A`` the same expression over absolute values. Where A is 0 (padding), the value must be exactly 0.
"""

from __future__ import annotations

from itertools import zip_longest

import torch

from ...runtime.context import ParallelContext
from ..kit.rank import Wrong
from .cells import DTYPES, Case, Cell, MatrixRow
from .embedding_norm_loss import CROSS_ENTROPY, EMBEDDING, LAYER_NORM, RMS_NORM
from .linear import COLUMN, COLUMN_BLOCKS, COLUMN_CONV1D, QKV, ROW, ROW_BLOCKS, ROW_CONV1D

__all__ = ["AXES", "DTYPES", "ROWS", "Case", "MatrixRow", "cases", "report", "run", "runnable"]

_PLAIN = (COLUMN, ROW, EMBEDDING, LAYER_NORM, RMS_NORM, CROSS_ENTROPY)
_SPECIAL = (COLUMN_BLOCKS, ROW_BLOCKS, COLUMN_CONV1D, ROW_CONV1D, QKV)
ROWS: dict[str, MatrixRow] = {row.name: row for row in (*_PLAIN, *_SPECIAL)}
AXES = {name: row.axes for name, row in ROWS.items()}


def cases(layer: str, dtype: str) -> list[Case]:
    return ROWS[layer].cases(dtype)


def runnable(ctx: ParallelContext, some: list[Case]) -> list[Case]:
    """The cases that can run here: not all devices have sparse tensors."""
    return [c for c in some if c.get("mode") != "sparse" or _has_sparse(ctx)]


def _has_sparse(ctx: ParallelContext) -> bool:
    try:
        torch.zeros(1, device=ctx.device).to_sparse()
    except (NotImplementedError, RuntimeError):
        return False
    return ctx.comm("tp").eager


def run(ctx: ParallelContext, some: list[Case]) -> Wrong:
    """Check every case on this rank; return the findings, empty if all is well."""
    wrong = Wrong()
    for case in runnable(ctx, some):
        try:
            cell = Cell(ctx, case, wrong)
            ROWS[case.layer].check(cell)
            cell.settle()
        except Exception as e:
            raise RuntimeError(f"{case} on rank {ctx.rank}: {type(e).__name__}: {e}") from e
    return wrong


def report(results: list[list[str]], failure: str = "") -> None:
    """Raise AssertionError with the findings of all ranks, if there are any: of each in turn."""
    wrong = [message for several in zip_longest(*results) for message in several if message is not None]
    if wrong:
        raise AssertionError(f"{failure}\n{len(wrong)} findings, the first of them:\n".lstrip() + "\n".join(wrong[:12]))
