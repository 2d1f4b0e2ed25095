"""These tests run XLA programs; they need torch_xla, which has an environment of its own (make venv-xla)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("torch_xla") is not None:
        return
    if os.environ.get("TPCORE_REQUIRE_XLA"):
        raise pytest.UsageError(
            "TPCORE_REQUIRE_XLA is set and torch_xla is not installed here: make venv-xla"
        )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason="needs torch_xla: make test-xla installs it and runs these")
            )
