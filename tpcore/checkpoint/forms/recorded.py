"""What optimum-neuron records beside its shards: cut dims, and linears that it fused or reordered."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ..storage.files import loads, read_file
from .inside import inside
from .pickles import top_of
from .source import Reading
from .transformations import Attention, Fused

_NAMES = ("mp_metadata_pp_rank_{}.json", "mp_metadata_pp_rank_{}.pt")  # of 0.2 and later, of 0.0.19 to 0.1
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError)


class Recorded(NamedTuple):
    """The metadata of one pipeline stage. ``names``: its parameters, of which tied ones are there once."""

    names: frozenset[str]
    dims: Mapping[str, int]
    made: Sequence[Fused | Attention]


def read_metadata(root: str, stages: int, how: Reading) -> list[Recorded]:
    """The metadata in ``root``, by stage. Empty if there are none, CheckpointError if some are missing."""
    paths = [[os.path.join(root, name.format(stage)) for name in _NAMES] for stage in range(stages)]
    found = [next((path for path in some if os.path.isfile(path)), None) for some in paths]
    if not any(found):
        return []
    read = []
    for stage, there in enumerate(found):
        if there is None:
            raise CheckpointError(f"{paths[stage][0]} is missing, and that of another stage is there")
        path = inside(root, os.path.basename(there), root)
        top = top_of(path, how) if path.endswith(".pt") else loads(read_file(path), path)
        try:
            read.append(_recorded(top, path))
        except _DAMAGE as e:
            raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {e}") from e
    return read


def _recorded(top: Mapping[str, Any], path: str) -> Recorded:
    made: Iterable[Fused | Attention]
    if "sharded_metadata" in top:
        parameters, made = top["sharded_metadata"], _of_attention(top["gqa_qkv_metadata"])
    else:
        parameters, made = top["parameters"], _transformations(top, path)
    dims = {
        str(name): int(p["partition_dim"])
        for name, p in parameters.items()
        # later versions record whether a parameter is cut, earlier ones its kind
        if p.get("tensor_model_parallel", p.get("kind") == "sharded")
    }
    return Recorded(frozenset(map(str, parameters)), dims, list(made))


# -- 0.2 and later -----------------------------------------------------------------------------------------
def _transformations(top: Mapping[str, Any], path: str) -> Iterator[Fused | Attention]:
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
            *_heads(spec),
        )
    raise ValueError(f"unknown transformation {kind!r}")


def _heads(spec: Mapping[str, Any]) -> tuple[int, int, int]:
    """The numbers of query heads, of kv heads, and of copies of each kv head."""
    q, kv, copies = (spec[n] for n in ("num_attention_heads", "num_key_value_heads", "kv_size_multiplier"))
    return int(q), int(kv), int(copies)


# -- 0.0.19 to 0.1 -----------------------------------------------------------------------------------------
def _of_attention(spec: Mapping[str, Any]) -> Iterator[Attention]:
    """The attention blocks of which ``spec`` maps original names to stored ones: ``a.q_proj.weight`` to
    ``a.qkv_proj.weight_q``, or all three to ``a.qkv_proj.weight_qkv``, in the order q, k, v."""
    blocks: dict[str, dict[str, str]] = defaultdict(dict)  # original names by "q", "k" and "v"
    for original, stored in spec["original_names_to_gqa_qkv_names"].items():
        base, _, part = str(stored).rpartition("_")
        found = blocks[f"{base}_qkv" if part == "qkv" else base]
        found["qkv"[len(found)] if part == "qkv" else part] = str(original)
    outputs = {
        name.removesuffix(".weight").rpartition(".")[0]: name
        for name in map(str, spec["output_projections_names"])
        if name.endswith(".weight")
    }
    for base, names in blocks.items():
        fused, stored = base.endswith("_qkv"), base.removesuffix("_qkv")
        module, _, end = stored.rpartition(".")
        yield Attention(
            {"qkv": base} if fused else {n: f"{stored}_{n}" for n in names},
            {n: names[n] for n in "qkv"},
            outputs[module.rpartition(".")[0]] if end == "weight" else None,
            *_heads(spec),
        )
