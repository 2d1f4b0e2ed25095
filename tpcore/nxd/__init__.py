"""NeuronX Distributed by its own paths: a script replaces ``neuronx_distributed`` by ``tpcore.nxd``.

Each module is at the path that NeuronX Distributed gives it, and what only its signatures need is in here alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = (
    "kernels",
    "modules",
    "optimizer",
    "overrides",
    "parallel_layers",
    "parallel_state",
    "pipeline",
    "trace",
    "trainer",
    "utils",
)


def __getattr__(name: str) -> Any:
    # on first use: a script that imports one path loads that alone
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    for module in ("trainer", "parallel_layers"):  # whose names NeuronX Distributed has at its root, too
        found = import_module(f"{__name__}.{module}")
        if name in found.__all__ and name != "NxDModel":  # at its root this is the class of inference
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
