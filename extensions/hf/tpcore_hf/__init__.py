"""Models of transformers: sharded in place by a plan, loaded, trained, adapted, and asked for tokens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import parallelize
    from .experts.count import ExpertLoad
    from .generate.cached import trace_causal_lm
    from .load.gathered import full_state_dict
    from .load.lazy import lazy
    from .load.shards import ShardSource
    from .load.source import WeightSource
    from .sequence.context_parallel import shard_sequence

_LATER = {
    "ExpertLoad": "experts.count",
    "ShardSource": "load.shards",
    "WeightSource": "load.source",
    "full_state_dict": "load.gathered",
    "lazy": "load.lazy",
    "parallelize": "api",
    "shard_sequence": "sequence.context_parallel",
    "trace_causal_lm": "generate.cached",
}

__all__ = ["ExpertLoad", "ShardSource", "WeightSource", "full_state_dict"]
__all__ += ["lazy", "parallelize", "shard_sequence", "trace_causal_lm"]


def __getattr__(name: str) -> Any:
    # on first use: the programs that ask tpcore for a name load this extension's hooks, and few of them all of it
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
