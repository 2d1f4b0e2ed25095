"""Writes a documentation page from the reports that ``tpcore verify`` saved.

python -m tpcore.testing.verify.page docs/verified docs/correctness.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from .report import Report, Row, figures

ABOUT = """\
# Correctness, as measured

This page is made by `make correctness` from what `tpcore verify` saved, not by hand. Each row
compares results with the unsharded computation on the CPU: collectives with what plain tensor
operations give, layers with those of `torch.nn`, forward and every gradient, training steps with
the same steps of the whole model. *Worst error* is the one that came nearest to what is allowed,
over all cases and ranks. What is allowed follows from the number of roundings and the size of what
is summed (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). *exact*: compared
bit for bit.

`tpcore verify --backend NAME --tp N` measures the same on your machine.
"""


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
        "| measured | dtype | cases | worst error | allowed | |",
        "|---|---|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *map(_line, _merged(report.rows)), "", "</details>", ""])


def _merged(rows: list[Row]) -> list[Row]:
    """Merge exact rows, those of collectives, that differ only in the dtype."""
    out: list[Row] = []
    for row in rows:
        last = out[-1] if out else None
        same = last is not None and last.what == row.what and _exact(last) and _exact(row)
        if last is not None and same:
            last.dtype += f", {row.dtype}"
            last.cases += row.cases
        else:
            out.append(row)
    return out


def _exact(row: Row) -> bool:
    return not (row.error or row.allowed or row.wrong)


def _line(row: Row) -> str:
    error, allowed = figures(row)
    verdict = "**wrong**" if row.wrong else "ok"
    return f"| {row.what} | {row.dtype} | {row.cases} | {error} | {allowed} | {verdict} |"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])))
