"""What a parameter carries about itself: how it is cut, and over which ranks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..comm import Comm
from ..shard import ShardSpec


@dataclass(frozen=True)
class Sharding:
    """What a parameter carries about itself: how it is cut and over which ranks."""

    spec: ShardSpec
    comm: Comm

    def __deepcopy__(self, memo: object) -> Sharding:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save(model.state_dict()) pickles attributes too: as data that weights_only loading accepts
        return OrderedDict, (list(self.spec.to_json().items()),)


def sharding(tensor: Tensor) -> Sharding | None:
    """The sharding of a parameter (or state_dict entry) of a parallel layer; None for any other tensor."""
    found = getattr(tensor, "tpcore_sharding", None)
    return found if isinstance(found, Sharding) else None


def stamp(tensor: Tensor, spec: ShardSpec, comm: Comm) -> None:
    """Mark ``tensor``, with the attributes that NxD and Megatron scripts read as well."""
    marks = {
        "tpcore_sharding": Sharding(spec, comm),
        "tensor_model_parallel": spec.dim is not None,
        "partition_dim": -1 if spec.dim is None else spec.dim,
        "partition_stride": max(1, len(spec.blocks)),
        "num_partitions": 1 if spec.dim is None else comm.size,
    }
    for name, value in marks.items():
        setattr(tensor, name, value)


def shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Specs of every state_dict entry; what no parallel layer owns is replicated."""
    specs = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, Tensor):  # not the extra state that a module may add
            found = sharding(t)
            specs[name] = found.spec if found else ShardSpec(tuple(t.shape))
    return specs
