"""``tpcore.parallelize``: a model of transformers, cut in place by a plan."""

from .api import parallelize
from .context import shard_sequence
from .load import ExpertLoad
from .loading import lazy
from .whole import full_state_dict

__all__ = ["ExpertLoad", "full_state_dict", "lazy", "parallelize", "shard_sequence"]
