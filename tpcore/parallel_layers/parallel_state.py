"""``tpcore.parallel_state`` under its second documented path."""

from ..parallel_state import *  # noqa: F403  whatever it publishes, so that the two cannot differ
from ..parallel_state import __all__ as __all__
