"""Tests of an extra are for the versions that it takes and for newer ones, which its range may have next."""

from __future__ import annotations

from importlib.metadata import requires, version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


def skip_below(extra: str) -> None:
    """Skip the module that calls this where a library is older than the ``extra`` takes."""
    for needed in map(Requirement, requires("tpcore") or ()):
        if needed.marker is not None and needed.marker.evaluate({"extra": extra}):
            low, here = [s.version for s in needed.specifier if s.operator == ">="], version(needed.name)
            if low and Version(here) < Version(*low):
                reason = f"tpcore[{extra}] needs {needed.name}>={low[0]}, and {here} is installed"
                pytest.skip(reason, allow_module_level=True)
