"""The correctness matrix: every layer under every option against the plain torch module, on any backend.

A case is data and its check a function of (ctx, case), so the same ones run on threads, on processes and on
compiled replicas. Each check builds the plain module at the same seed, once in the case's dtype (the initial
values must agree) and once in float64, feeds both the same numbers, and compares this rank's part of the
output and of every gradient with an elementwise error bound.

The bounds are those of Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: a sum of K
products computed in any order is off by at most about ``K u sum |products|``, u being the unit roundoff of
the accumulator, and each rounding of the result to the storage dtype adds its own u. So a bound is
``A * (roundings * u + 2 * K * u_acc)`` with ``A`` the same expression over absolute values. Where A is 0
(padding), the value must be exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

from ...context import ParallelContext
from .cases import AXES, DTYPES, Case, cases, points
from .compare import Findings
from .embedding import embedding
from .linear import column, row
from .loss import cross_entropy
from .norm import layer_norm, rms_norm

__all__ = ["AXES", "DTYPES", "Case", "cases", "check", "findings_of", "points", "report", "run", "runnable"]

CHECKS: dict[str, Callable[[ParallelContext, Case, Findings], None]] = {
    "column": column,
    "row": row,
    "embedding": embedding,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "cross_entropy": cross_entropy,
}


def run(ctx: ParallelContext, some: list[Case]) -> list[str]:
    """Check every case on this rank; the findings, empty if all is well."""
    out: list[str] = []
    for case in runnable(ctx, some):
        out += check(ctx, case)
    return out


def runnable(ctx: ParallelContext, some: list[Case]) -> list[Case]:
    """Lazy devices have no sparse tensors."""
    return [c for c in some if ctx.comm("tp").eager or ("mode", "sparse") not in c.options]


def check(ctx: ParallelContext, case: Case) -> list[str]:
    return findings_of(ctx, case).messages


def findings_of(ctx: ParallelContext, case: Case) -> Findings:
    findings = Findings(ctx, case)
    try:
        CHECKS[case.layer](ctx, case, findings)
        findings.settle()
    except Exception as e:
        raise RuntimeError(f"{case} on rank {ctx.rank}: {type(e).__name__}: {e}") from e
    return findings


def report(results: list[list[str]]) -> None:
    """Fail with what all ranks found."""
    found = [message for rank in results for message in rank]
    if found:
        raise AssertionError(f"{len(found)} findings, the first of them:\n" + "\n".join(found[:12]))
