"""Shards of optimum-neuron, with its metadata files: cut dims and fused linears."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...shard import ShardSpec
from ...storage.files import loads, read_file
from ..tensors.stored import Stored
from .inside import inside
from .pickled import PickledShards, find
from .pickles import mapped
from .rank_files import even_cut
from .source import Form, Reading, Source, State
from .transformations import Attention, Fused, Original


class Recorded(NamedTuple):
    """The metadata of one pipeline stage."""

    dims: Mapping[str, int]
    made: Sequence[Fused | Attention]


class OptimumShards(PickledShards):
    """Pickled shards with metadata files."""

    def __init__(
        self, path: str, files: Sequence[Sequence[str]], how: Reading, recorded: Sequence[Recorded]
    ) -> None:
        super().__init__(path, files, how)
        self._recorded = recorded

    @property
    def mixed(self) -> bool:
        return any(stage.made for stage in self._recorded)

    def cut(self, name: str, shape: tuple[int, ...], pp_rank: int) -> ShardSpec | None:
        dim = self._recorded[pp_rank].dims.get(name)
        return None if dim is None else even_cut(shape, self.tp, dim)

    def originals(self, states: Sequence[Mapping[str, Any]], pp_rank: int) -> tuple[State, set[str]]:
        found: State = {}
        transformations = self._recorded[pp_rank].made
        for made in transformations:
            names = [name for name in made.used() if name not in states[0]]
            if names == made.used():
                continue  # not saved
            if names:
                raise CheckpointError(
                    f"{self.files[pp_rank][0]} has no {names[0]!r}, which its metadata name"
                )
            for name, dim, pieces in self._originals(made, states):
                parts = [mapped(piece, name, self.path) for piece in pieces]
                cut = even_cut(parts[0].shape, len(parts), dim)
                found[name] = Stored.over_tp(name, cut, len(parts), None, parts.__getitem__)
        return found, {name for made in transformations for name in made.used()}

    def _originals(self, made: Fused | Attention, states: Sequence[Mapping[str, Any]]) -> list[Original]:
        try:
            return list(made.originals({name: [state[name] for state in states] for name in made.used()}))
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as e:
            why = f"{type(e).__name__}: {e}"
            raise CheckpointError(f"{self.path}: {made.used()} are not as their metadata say: {why}") from e


def _read_metadata(root: str, stages: int) -> list[Recorded]:
    """The metadata in ``root``, by stage. Empty if a stage has none."""
    found = []
    for stage in range(stages):
        path = os.path.join(root, f"mp_metadata_pp_rank_{stage}.json")
        if not os.path.isfile(path):
            return []
        top = loads(read_file(inside(root, os.path.basename(path), root)), path)
        try:
            found.append(Recorded(_dims(top), list(_transformations(top, path))))
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
            raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {e}") from e
    return found


def _dims(top: Mapping[str, Any]) -> dict[str, int]:
    """Cut dim by parameter name. Newer versions record whether a parameter is cut, older ones its kind."""
    parameters = top["parameters"] if "parameters" in top else top["sharded_metadata"]
    return {
        str(name): int(p["partition_dim"])
        for name, p in parameters.items()
        if p.get("tensor_model_parallel", p.get("kind") == "sharded")
    }


def _transformations(top: Mapping[str, Any], path: str) -> Iterator[Fused | Attention]:
    if top.get("gqa_qkv_metadata"):
        raise CheckpointError(f"{path} is of an older optimum-neuron, whose fused projections are not read")
    for module in top.get("model_weight_transformation_specs", ()):
        prefix = f"{module['module_fully_qualified_name']}."
        for kind, spec in module["specs"]:
            if spec.get("peft_type") is not None:
                raise CheckpointError(f"{path} is of adapters of the kind {spec['peft_type']!r}: not read")
            for end in ("weight", "bias") if spec["bias"] else ("weight",):
                yield _transformation(kind, spec, prefix, end)


def _transformation(kind: str, spec: Mapping[str, Any], prefix: str, end: str) -> Fused | Attention:
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


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    found = find(path)
    if found is None:
        return None
    root, stages = found
    above = os.path.dirname(root) if os.path.basename(root) == "model" else root
    recorded = _read_metadata(above, len(stages))
    return OptimumShards(path, stages, how, recorded) if recorded else None


FORM = Form(sharded=True, open=_open)
