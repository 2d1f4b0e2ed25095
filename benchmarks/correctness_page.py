"""Writes a documentation page from the reports that ``tpcore verify`` saved.

python -m benchmarks.correctness_page docs/verified docs/correctness.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from tpcore.testing.verify.report import Report, Row

ABOUT = """\
# Correctness, as measured

This page is made by `make correctness` from what `tpcore verify` saved, not by hand. Each row
compares results with the unsharded computation on the CPU: collectives with what plain tensor
operations give, layers with those of `torch.nn`, forward and every gradient, training steps with
the same steps of the whole model. A figure is the error that came nearest to what is allowed, over
all cases and ranks, and its share of that. What is allowed follows from the number of roundings and
the size of what is summed (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
*exact*: compared bit for bit.

`tpcore verify --backend NAME --tp N` measures the same on your machine.
"""


_FLOATS = ("float32", "bfloat16", "float16", "float64")
SUMMARY = (
    "| backend, mesh | cases | of them bit for bit | nearest to what is allowed | wrong |",
    "|---|---:|---:|---|---:|",
)


def page(folder: Path) -> str:
    """The text of the page, from every file in ``folder``."""
    reports = [Report.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return "\n".join([ABOUT, *SUMMARY, *map(_total, reports), "", *map(_section, reports)])


def _total(report: Report) -> str:
    """One line for all cases of a report."""
    cases = sum(row.cases for row in report.rows)
    exact = sum(row.cases for row in report.rows if _exact(row))
    near = max((row for row in report.rows if row.allowed), key=lambda row: row.error / row.allowed)
    nearest = f"{near.what}, {near.dtype}: {near.error / near.allowed:.2f} of it"
    return f"| {_title(report)} | {cases} | {exact} | {nearest} | {len(report.wrong)} |"


def _title(report: Report) -> str:
    return f"{report.backend}, " + " x ".join(f"{axis}{n}" for axis, n in report.mesh.items() if n > 1)


def _section(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    wrong = len(report.wrong)
    verdict = f"{wrong} results are wrong." if wrong else "Nothing is wrong."
    lines = [
        f"## {_title(report)}",
        "",
        f"{report.date} UTC, {versions}, {report.machine}. {verdict}",
        "",
        *([report.note, ""] if report.note else []),
        "<details markdown>",
        "<summary>Each measurement</summary>",
        "",
        f"| measured | cases | {' | '.join(_FLOATS)} | integers, bool |",
        "|---|---:|" + "---:|" * len(_FLOATS) + "---|",
    ]
    rows: dict[str, list[Row]] = {}
    for row in report.rows:
        rows.setdefault(row.what, []).append(row)
    return "\n".join([*lines, *(_line(what, of) for what, of in rows.items()), "", "</details>", ""])


def _exact(row: Row) -> bool:
    return not (row.error or row.allowed or row.wrong)


def _line(what: str, rows: list[Row]) -> str:
    """All dtypes of one thing that was measured."""
    floats = [" ".join(_cell(row) for row in rows if row.dtype == dtype) for dtype in _FLOATS]
    others = {_cell(row) for row in rows if row.dtype not in _FLOATS}
    return f"| {what} | {sum(row.cases for row in rows)} | {' | '.join(floats)} | {' '.join(sorted(others))} |"


def _cell(row: Row) -> str:
    if row.wrong:
        return f"**wrong**: {row.error:.1e}"
    return f"{row.error:.1e} ({row.error / row.allowed:.2f})" if row.allowed else "exact"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])))
