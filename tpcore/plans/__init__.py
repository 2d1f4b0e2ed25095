"""``tpcore.parallelize``: a model of transformers, cut in place by a plan."""

from .parallelize import parallelize

__all__ = ["parallelize"]
