"""Distributions with one backend, as an installer leaves them."""

from __future__ import annotations

import textwrap
from pathlib import Path


def installed(place: Path, name: str, code: str, distribution: str = "", version: str = "1") -> str:
    """In ``place``, which is to be on the path. The name of the plugin's module."""
    distribution = distribution or f"tpcore-{name}"
    module = distribution.replace("-", "_")
    info = place / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[tpcore]\n{name} = {module}\n")
    (place / f"{module}.py").write_text(textwrap.dedent(code))
    return module
