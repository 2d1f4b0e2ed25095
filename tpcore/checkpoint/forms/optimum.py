"""What optimum-neuron records beside its shards: which dims are cut, and which linears it made one of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError
from ...storage.files import read_file
from ...storage.jsonfile import loads
from .huggingface import inside

Shards = Mapping[str, Sequence[Tensor]]
"""Of every rank, by name."""


class Original(NamedTuple):
    """A tensor of the original model: equal pieces along ``dim``, in order."""

    name: str
    dim: int
    pieces: list[Tensor]


@dataclass(frozen=True)
class Fused:
    """Linears one after the other in each rank's shard. ``sizes``: theirs along ``dim``, whole."""

    fused: str
    names: Sequence[str]
    dim: int
    sizes: Sequence[int]

    def originals(self, shards: Shards) -> Iterator[Original]:
        tensors, at = shards[self.fused], 0
        for name, size in zip(self.names, self.sizes, strict=True):
            length = size // len(tensors)
            yield Original(name, self.dim, [t.narrow(self.dim, at, length) for t in tensors])
            at += length

    def used(self) -> list[str]:
        return [self.fused]


@dataclass(frozen=True)
class Attention:
    """q, k, v and the output projection of grouped-query attention with ``copies`` of each kv head.

    The kv heads are laid out as ``a b a b`` over the ranks, and the query heads, which the output
    projection takes in the same order, so that each stands with a copy of its kv head.
    """

    stored: Mapping[str, str]  # the name in the shards by "q", "k", "v", and "qkv" where they are one
    names: Mapping[str, str]  # the original one
    output: str | None  # cut along dim 1
    q_heads: int
    kv_heads: int
    copies: int

    def originals(self, shards: Shards) -> Iterator[Original]:
        q, k, v = self._parts(shards)
        order = self._order()
        yield Original(self.names["q"], 0, _sorted(q, order, 0))
        first = list(range(self.kv_heads)) * self.copies
        for name, tensors in (("k", k), ("v", v)):
            yield Original(self.names[name], 0, _sorted(tensors, first, 0)[: self.kv_heads])
        if self.output is not None:
            yield Original(self.output, 1, _sorted(shards[self.output], order, 1))

    def _parts(self, shards: Shards) -> list[Sequence[Tensor]]:
        if "qkv" not in self.stored:
            return [shards[self.stored[name]] for name in "qkv"]
        fused = shards[self.stored["qkv"]]
        heads = self.q_heads + 2 * self.kv_heads * self.copies
        size = fused[0].shape[0] * len(fused) // heads
        q, kv = (size * n // len(fused) for n in (self.q_heads, self.kv_heads * self.copies))
        return [[t.narrow(0, at, length) for t in fused] for at, length in ((0, q), (q, kv), (q + kv, kv))]

    def _order(self) -> list[int]:
        """The query head at each place, over all ranks."""
        group, each = self.q_heads // self.kv_heads, self.q_heads // (self.kv_heads * self.copies)
        return [
            kv * group + copy * each + i
            for copy in range(self.copies)
            for kv in range(self.kv_heads)
            for i in range(each)
        ]

    def used(self) -> list[str]:
        return [*self.stored.values(), *([] if self.output is None else [self.output])]


def _sorted(tensors: Sequence[Tensor], order: Sequence[int], dim: int) -> list[Tensor]:
    """Single heads in order, then further copies. Place ``i`` over all ranks holds number ``order[i]``."""
    count = len(order) // len(tensors)
    heads = [head for t in tensors for head in t.chunk(count, dim)]
    if len(heads) != len(order):
        raise CheckpointError(f"shards of shape {tuple(tensors[0].shape)} are not of {count} heads each")
    places = sorted(range(len(order)), key=lambda place: (place >= len(set(order)), order[place]))
    return [heads[place] for place in places]


class Recorded(NamedTuple):
    """Of one pipeline stage."""

    dims: Mapping[str, int]
    made: Sequence[Fused | Attention]


def recorded(root: str, stages: int) -> list[Recorded]:
    """By stage, what is on record in ``root``; nothing if nothing is."""
    found = []
    for stage in range(stages):
        path = os.path.join(root, f"mp_metadata_pp_rank_{stage}.json")
        if not os.path.isfile(path):
            return []
        top = loads(read_file(inside(root, os.path.basename(path), root)), path)
        try:
            found.append(Recorded(_dims(top), list(_made(top, path))))
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
            raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {e}") from e
    return found


def _dims(top: Mapping[str, Any]) -> dict[str, int]:
    """Newer versions say whether a parameter is cut, older ones of what kind it is."""
    parameters = top["parameters"] if "parameters" in top else top["sharded_metadata"]
    return {
        str(name): int(p["partition_dim"])
        for name, p in parameters.items()
        if p.get("tensor_model_parallel", p.get("kind") == "sharded")
    }


def _made(top: Mapping[str, Any], path: str) -> Iterator[Fused | Attention]:
    if top.get("gqa_qkv_metadata"):
        raise CheckpointError(f"{path} is of an older optimum-neuron, whose fused projections are not read")
    for module in top.get("model_weight_transformation_specs", ()):
        prefix = f"{module['module_fully_qualified_name']}."
        for kind, spec in module["specs"]:
            if spec.get("peft_type") is not None:
                raise CheckpointError(f"{path} is of adapters of the kind {spec['peft_type']!r}: not read")
            for end in ("weight", "bias") if spec["bias"] else ("weight",):
                yield _one(kind, spec, prefix, end)


def _one(kind: str, spec: Mapping[str, Any], prefix: str, end: str) -> Fused | Attention:
    if kind == "FusedLinearsSpec":
        dim = {"column": 0, "row": 1}.get(spec["fuse_axis"], spec["fuse_axis"])
        names = [f"{prefix}{name}.{end}" for name in spec["linear_names"]]
        return Fused(f"{prefix}{spec['fused_linear_name']}.{end}", names, dim, spec["original_dims"])
    if kind == "GQAQKVColumnParallelLinearSpec":
        stored = f"{prefix}{spec['gqa_qkv_projection_name']}.{end}"
        long = {"q": "query", "k": "key", "v": "value"}
        return Attention(
            {"qkv": f"{stored}_qkv"} if spec["fuse_qkv"] else {n: f"{stored}_{n}" for n in "qkv"},
            {n: f"{prefix}{spec[f'{name}_projection_name']}.{end}" for n, name in long.items()},
            f"{prefix}{spec['output_projection_name']}.{end}" if end == "weight" else None,
            *(
                int(spec[name])
                for name in ("num_attention_heads", "num_key_value_heads", "kv_size_multiplier")
            ),
        )
    raise ValueError(f"unknown transformation {kind!r}")
