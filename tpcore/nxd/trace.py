"""Tracing and serving under their NeuronX Distributed path."""

from ..trace import *  # noqa: F403
from ..trace import __all__ as __all__
