"""Writes a documentation page from the reports that ``tpcore verify`` saved.

python -m benchmarks.correctness_page docs/verified docs/correctness.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from tpcore_explain.verify.report import Report, Row

ABOUT = """\
# Correctness, as measured

`make correctness` writes this page from what `tpcore verify` saved; `docs/verified` has the reports, by dtype.
`tpcore verify --backend NAME --tp N` measures your machine. The reference is the unsharded computation on the CPU:
plain tensor operations for collectives, `torch.nn` for layers (forward and every gradient), the whole model for
training steps.

The allowed error follows from the number of roundings and the size of the sum (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1). *exact*: compared bit for bit.
"""


SUMMARY = (
    "| backend, mesh | cases | of them bit for bit | largest share of the allowed error | wrong |",
    "|---|---:|---:|---|---:|",
)
EACH = """\
## Each measurement

The largest share of the allowed error, over all cases, ranks and dtypes.
"""

BITS = """\
## The same bits

The hash of all weights after training with `reproducible=8` ([how](reproducible.md)), with ranks as threads:
`python -m benchmarks.reproducible bits`.
"""


def page(folder: Path) -> str:
    """The text of the page, from every file in ``folder``."""
    reports = [Report.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))]
    bits = [BITS, path.read_text()] if (path := folder / "reproducible.md").exists() else []
    parts = [ABOUT, *SUMMARY, *map(_total, reports), "", *map(_section, reports), EACH, *_each(reports), ""]
    return "\n".join([*parts, *bits])


def _total(report: Report) -> str:
    """One line for all cases of a report."""
    cases = sum(row.cases for row in report.rows)
    exact = sum(row.cases for row in report.rows if _exact(row))
    near = max((row for row in report.rows if row.allowed), key=_share)
    return f"| {_title(report)} | {cases} | {exact} | {near.what}, {_figure(near)} | {len(report.wrong)} |"


def _title(report: Report) -> str:
    return f"{report.backend}, " + " x ".join(f"{axis}{n}" for axis, n in report.mesh.items() if n > 1)


def _section(report: Report) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    wrong = len(report.wrong)
    verdict = f"{wrong} results are wrong." if wrong else "Nothing is wrong."
    lines = [f"## {_title(report)}", "", f"{report.date} UTC, {versions}, {report.machine}. {verdict}", ""]
    return "\n".join([*lines, *([report.note, ""] if report.note else [])])


def _each(reports: list[Report]) -> list[str]:
    """What was exact in all reports, and a table of the rest."""
    names = list(dict.fromkeys(row.what for report in reports for row in report.rows))
    exact = [name for name in names if all(_exact(row) for report in reports for row in _rows(report, name))]
    return [
        f"Exact in every dtype and run: {'; '.join(exact)}.",
        "",
        "| measured | " + " | ".join(map(_title, reports)) + " |",
        "|---|" + "---|" * len(reports),
        *(
            f"| {name} | {' | '.join(_cell(_rows(report, name)) for report in reports)} |"
            for name in names
            if name not in exact
        ),
    ]


def _rows(report: Report, name: str) -> list[Row]:
    return [row for row in report.rows if row.what == name]


def _exact(row: Row) -> bool:
    return not (row.error or row.allowed or row.wrong)


def _share(row: Row) -> float:
    return row.error / row.allowed if row.allowed else 0.0


def _cell(rows: list[Row]) -> str:
    """All dtypes of one measurement."""
    wrong = [row for row in rows if row.wrong]
    if wrong or not any(row.allowed for row in rows):
        return ", ".join(f"**wrong**: {row.dtype} {row.error:.1e}" for row in wrong) or "exact" * bool(rows)
    return _figure(max(rows, key=_share))


def _figure(row: Row) -> str:
    return f"{row.dtype} {_share(row):.2f}"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])))
