"""``tpcore_nxd.parallel_layers.parallel_state`` by a shorter name."""

from __future__ import annotations

from .parallel_layers.parallel_state import *  # noqa: F403
from .parallel_layers.parallel_state import __all__ as __all__
