"""Shards of NeuronX Distributed; of optimum-neuron, with metadata: cut dims, and the inverse of transformations."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpcore.checkpoint.forms.pickles import equal, top_of
from tpcore.checkpoint.forms.rank_files import Original, PickledShards, even_spec, find
from tpcore.checkpoint.forms.source import Form, Reading, Source, inside
from tpcore.checkpoint.storage.files import damage, loads, read_file
from tpcore.errors import CheckpointError
from tpcore.layout.shard import ShardSpec

Shards = Mapping[str, Sequence[Tensor]]
"""The shards of all ranks, by name."""


class Transformation(NamedTuple):
    """Makes tensors of the original model from the shards of the names ``used``."""

    used: Sequence[str]
    originals: Callable[[Shards], Iterator[Original]]


def _of_fused(fused: str, names: Sequence[str], dim: int, sizes: Sequence[int]) -> Transformation:
    """Of linears that follow each other in each rank's shard. ``sizes``: their unsharded sizes along ``dim``."""

    def originals(shards: Shards) -> Iterator[Original]:
        tensors, at = shards[fused], 0
        for name, size in zip(names, sizes, strict=True):
            length = size // len(tensors)
            yield Original(name, dim, [t.narrow(dim, at, length) for t in tensors])
            at += length

    return Transformation([fused], originals)


def _of_attention(
    stored: Mapping[str, str], names: Mapping[str, str], output: str | None, spec: Mapping[str, Any]
) -> Transformation:
    """Of q, k, v and the output projection of grouped-query attention with copies of each kv head, in the order
    ``a b a b`` over the ranks. Each query head, and its columns of the output projection, is on a rank with a copy of
    its kv head. ``stored``: names in the shards by "q", "k" and "v", or by "qkv" if fused. ``names``: original ones."""
    counts = ("num_attention_heads", "num_key_value_heads", "kv_size_multiplier")
    q_heads, kv_heads, copies = (int(spec[name]) for name in counts)

    def parts(shards: Shards) -> list[Sequence[Tensor]]:
        if "qkv" not in stored:
            return [shards[stored[name]] for name in "qkv"]
        fused = shards[stored["qkv"]]
        size = fused[0].shape[0] * len(fused) // (q_heads + 2 * kv_heads * copies)
        q, kv = (size * n // len(fused) for n in (q_heads, kv_heads * copies))
        return [[t.narrow(0, at, length) for t in fused] for at, length in ((0, q), (q, kv), (q + kv, kv))]

    def originals(shards: Shards) -> Iterator[Original]:
        q, k, v = parts(shards)
        # the query head at each position, over all ranks
        order = torch.arange(q_heads).view(kv_heads, copies, -1).transpose(0, 1).flatten().tolist()
        yield Original(names["q"], 0, _sorted(q, order, 0))
        for name, tensors in (("k", k), ("v", v)):
            yield Original(names[name], 0, _sorted(tensors, [*range(kv_heads)] * copies, 0)[:kv_heads])
        if output is not None:
            yield Original(output, 1, _sorted(shards[output], order, 1))

    return Transformation([*stored.values(), *([] if output is None else [output])], originals)


def _sorted(tensors: Sequence[Tensor], order: Sequence[int], dim: int) -> list[Tensor]:
    """Single heads in order, then further copies. Position ``i`` over all ranks has head ``order[i]``."""
    count = len(order) // len(tensors)
    heads = [head for t in tensors for head in t.chunk(count, dim)]
    if len(heads) != len(order):
        raise CheckpointError(f"shards of shape {tuple(tensors[0].shape)} are not of {count} heads each")
    places = sorted(range(len(order)), key=lambda place: (place >= len(set(order)), order[place]))
    return [heads[place] for place in places]


_NAMES = ("mp_metadata_pp_rank_{}.json", "mp_metadata_pp_rank_{}.pt")  # of 0.2 and later, of 0.0.19 to 0.1


class Recorded(NamedTuple):
    """The metadata of one pipeline stage. ``names``: its parameters, of which tied ones are there once."""

    names: frozenset[str]
    dims: Mapping[str, int]
    transformations: Sequence[Transformation]


def read_metadata(root: str, stages: int, how: Reading) -> list[Recorded]:
    """The metadata in ``root``, by stage. Empty if there are none, CheckpointError if some are missing."""
    paths = [[os.path.join(root, name.format(stage)) for name in _NAMES] for stage in range(stages)]
    existing = [[path for path in some if os.path.isfile(path)] for some in paths]
    read = []
    for some, there in zip(paths, existing, strict=True) if any(existing) else ():
        if not there:
            raise CheckpointError(f"{some[0]} is missing, and that of another stage is there")
        path = inside(root, os.path.basename(there[0]), root)
        top = top_of(path, how) if path.endswith(".pt") else loads(read_file(path), path)
        with damage(path):
            read.append(_recorded(top, path))
    return read


def _recorded(top: Mapping[str, Any], path: str) -> Recorded:
    transformations: Iterable[Transformation]
    if "sharded_metadata" in top:
        parameters, transformations = top["sharded_metadata"], _attention_blocks(top["gqa_qkv_metadata"])
    else:
        parameters, transformations = top["parameters"], _transformations(top, path)
    dims = {
        str(name): int(p["partition_dim"])
        for name, p in parameters.items()
        # later versions record whether a parameter is sharded, earlier ones its kind
        if p.get("tensor_model_parallel", p.get("kind") == "sharded")
    }
    return Recorded(frozenset(map(str, parameters)), dims, list(transformations))


# -- 0.2 and later -----------------------------------------------------------------------------------------
def _transformations(top: Mapping[str, Any], path: str) -> Iterator[Transformation]:
    for module in top.get("model_weight_transformation_specs", ()):
        prefix = f"{module['module_fully_qualified_name']}."
        for kind, spec in module["specs"]:
            if spec.get("peft_type") is not None:
                raise CheckpointError(f"{path} is of adapters of the kind {spec['peft_type']!r}: not read")
            for end in ("weight", "bias") if spec["bias"] else ("weight",):
                yield _transformation(kind, spec, prefix, end)


def _transformation(kind: str, spec: Mapping[str, Any], prefix: str, end: str) -> Transformation:
    if kind == "FusedLinearsSpec":
        dim = {"column": 0, "row": 1}.get(spec["fuse_axis"], spec["fuse_axis"])
        names = [f"{prefix}{name}.{end}" for name in spec["linear_names"]]
        return _of_fused(f"{prefix}{spec['fused_linear_name']}.{end}", names, dim, spec["original_dims"])
    if kind == "GQAQKVColumnParallelLinearSpec":
        stored = f"{prefix}{spec['gqa_qkv_projection_name']}.{end}"
        long = {"q": "query", "k": "key", "v": "value"}
        return _of_attention(
            {"qkv": f"{stored}_qkv"} if spec["fuse_qkv"] else {n: f"{stored}_{n}" for n in "qkv"},
            {n: f"{prefix}{spec[f'{name}_projection_name']}.{end}" for n, name in long.items()},
            f"{prefix}{spec['output_projection_name']}.{end}" if end == "weight" else None,
            spec,
        )
    raise ValueError(f"unknown transformation {kind!r}")


# -- 0.0.19 to 0.1 -----------------------------------------------------------------------------------------
def _attention_blocks(spec: Mapping[str, Any]) -> Iterator[Transformation]:
    """The attention blocks of which ``spec`` maps original names to stored ones: ``a.q_proj.weight`` to
    ``a.qkv_proj.weight_q``, or all three to ``a.qkv_proj.weight_qkv``, in the order q, k, v."""
    blocks: dict[str, dict[str, str]] = defaultdict(dict)  # original names by "q", "k" and "v"
    for original, stored in spec["original_names_to_gqa_qkv_names"].items():
        base, _, part = str(stored).rpartition("_")
        names = blocks[f"{base}_qkv" if part == "qkv" else base]
        names["qkv"[len(names)] if part == "qkv" else part] = str(original)
    outputs = {
        name.removesuffix(".weight").rpartition(".")[0]: name
        for name in map(str, spec["output_projections_names"])
        if name.endswith(".weight")
    }
    for base, names in blocks.items():
        fused, stored = base.endswith("_qkv"), base.removesuffix("_qkv")
        module, _, end = stored.rpartition(".")
        yield _of_attention(
            {"qkv": base} if fused else {n: f"{stored}_{n}" for n in names},
            {n: names[n] for n in "qkv"},
            outputs[module.rpartition(".")[0]] if end == "weight" else None,
            spec,
        )


class OptimumShards(PickledShards):
    def __init__(self, path: str, files: Sequence[Sequence[str]], how: Reading, recorded: Sequence[Recorded]) -> None:
        super().__init__(path, files, how)
        self._recorded = recorded
        self.mixed = any(stage.transformations for stage in recorded)

    def spec(self, name: str, shape: tuple[int, ...], pp_rank: int) -> ShardSpec | None:
        dim = self._recorded[pp_rank].dims.get(name)
        if dim is None and not any(name in stage.names for stage in self._recorded):
            dim = self._of_tied(name, pp_rank)
        return None if dim is None else even_spec(shape, self.tp, dim)

    def _of_tied(self, name: str, pp_rank: int) -> int | None:
        """The sharded dim of a tensor that is recorded under another name, which has the same values on all ranks."""
        shards = [self.contents(file)[0][name] for file in self.files[pp_rank]]
        if all(equal(t, shards[0]) for t in shards):
            return None  # not sharded: a buffer
        for stage, recorded in enumerate(self._recorded):
            every = [self.contents(file)[0] for file in self.files[stage]]
            for other, dim in recorded.dims.items():
                if all(equal(state.get(other), t) for state, t in zip(every, shards, strict=True)):
                    return dim
        return None

    def originals(self, states: Sequence[Mapping[str, Any]], pp_rank: int) -> tuple[list[Original], set[str]]:
        originals: list[Original] = []
        used: set[str] = set()
        for transformation in self._recorded[pp_rank].transformations:
            names = list(transformation.used)
            used.update(names)
            missing = [name for name in names if name not in states[0]]
            if missing == names:
                continue  # not saved
            if missing:
                raise CheckpointError(f"{self.files[pp_rank][0]} has no {missing[0]!r}, which its metadata name")
            try:
                originals += transformation.originals({name: [state[name] for state in states] for name in names})
            except (ArithmeticError, IndexError, RuntimeError, ValueError) as e:
                why = f"{type(e).__name__}: {e}"
                raise CheckpointError(f"{self.path}: {names} are not as their metadata say: {why}") from e
        return originals, used | self._of_others(states[0], pp_rank)

    def _of_others(self, state: Mapping[str, Any], pp_rank: int) -> set[str]:
        """Names in a stage's file of other stages' parameters: some versions write them all, without values."""
        own_names = self._recorded[pp_rank].names
        every = {name for stage in self._recorded for name in stage.names}
        empty = {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}
        return ((every & state.keys()) | empty) - own_names


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    shards = find(path)
    if shards is None:
        return None
    root, stages = shards
    above = os.path.dirname(root) if os.path.basename(root) == "model" else root
    recorded = read_metadata(above, len(stages), how)
    return OptimumShards(path, stages, how, recorded) if recorded else PickledShards(path, stages, how)


FORM = Form(sharded=True, open=_open)
