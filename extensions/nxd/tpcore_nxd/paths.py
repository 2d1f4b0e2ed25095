"""Further paths of modules, under which NeuronX Distributed has them too."""

from __future__ import annotations

import sys

from . import marks as marks  # of a script that imports any of them, marks on parameters are read


def mirror(module: str, *paths: str) -> None:
    """Let ``module`` be found by ``paths`` below ``tpcore_nxd``, too: NeuronX Distributed has parts of it there."""
    for path in paths:
        parent, _, name = f"{__package__}.{path}".rpartition(".")
        sys.modules[f"{parent}.{name}"] = sys.modules[module]
        setattr(sys.modules[parent], name, sys.modules[module])
