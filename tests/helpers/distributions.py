"""Distributions with one plugin, as an installer leaves them."""

from __future__ import annotations

import textwrap
from pathlib import Path


def installed(
    place: Path, name: str, code: str, distribution: str = "", version: str = "1", group: str = "tpcore"
) -> str:
    """In ``place``, which is to be on the path: a backend, or a plugin of another ``group``. The name of its module."""
    distribution = distribution or f"tpcore-{name}"
    module = distribution.replace("-", "_")
    info = place / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
    (place / f"{module}.py").write_text(textwrap.dedent(code))
    return module
