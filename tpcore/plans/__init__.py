"""``tpcore.parallelize``: a model of transformers, cut in place by a plan."""

from .lazy import lazy
from .parallelize import parallelize
from .whole import full_state_dict

__all__ = ["full_state_dict", "lazy", "parallelize"]
