"""Which points of the kit are drills."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A class says by ``drill`` which points of its products `make drills` alone runs."""
    for item in items:
        drill = getattr(getattr(item, "cls", None), "drill", None)
        params = getattr(getattr(item, "callspec", None), "params", {})
        if drill is not None and drill(getattr(item, "originalname", ""), params):
            item.add_marker(pytest.mark.drill)
