"""NeuronX Distributed by its own paths: a script replaces ``neuronx_distributed`` by ``tpcore_nxd``.

Names are at the paths that NeuronX Distributed gives them, and what only its signatures need is in here alone.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.18.0"
"""Of NeuronX Distributed, whose names are here."""


def __getattr__(name: str) -> Any:
    # on first use: a script that imports one path loads that alone
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    for module in ("trainer", "parallel_layers"):  # whose names NeuronX Distributed has at its root, too
        implementation = import_module(f"{__name__}.{module}")
        if name in implementation.__all__ and name != "NxDModel":  # at its root this is the class of inference
            return getattr(implementation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
