"""What a run left out, said in its last lines, and tests that take long without the mark ``slow``."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

XLA = find_spec("torch_xla") is not None
SECONDS = 5.0  # of a test by itself, without the fixtures that it shares with others
COMMANDS = {"slow": "make test-all", "drill": "make drills"}


class Selection:
    """A plugin of each process of pytest-xdist. The workers select and tell the first process how many."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out: Counter[str] = Counter()
        self.long: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)  # of those that -m and -k have left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.getoption("first"):
            items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
            items.reverse()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        marks = [next((m for m in ("drill", "slow") if item.get_closest_marker(m)), "") for item in items]
        self.left_out.update(marks)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left out"] = dict(self.left_out)
        elif any(s > 8 * SECONDS for s in self.long.values()) and self.config.getoption("limit"):
            # a test of 3 s took 20 s on a machine whose neighbours were busy: what is above 5 s is
            # named, and only what no such neighbour explains fails
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts = getattr(node, "workeroutput", {}).get("left out")  # alike in all workers
        self.left_out = Counter(counts or self.left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A machine with more to do than it has cores takes as many times longer."""
        seconds = report.duration / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        left_out = COMMANDS.keys() & report.keywords.keys() or "tests/xla/" in report.nodeid
        if report.when == "call" and seconds > SECONDS and not left_out:
            self.long[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, seconds in self.long.items():
            terminalreporter.line(f"{test} took {seconds:.1f} s: mark it slow, or make it quicker", red=True)
        for mark, command in COMMANDS.items():
            if self.left_out[mark]:
                terminalreporter.line(f"{self.left_out[mark]} tests marked {mark} were not run: {command}")
        if not XLA:
            terminalreporter.line("tests/xla was not run, for torch_xla is not installed here: make test-all")
