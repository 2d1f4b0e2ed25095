"""Checkpoints of Megatron-LM's ``torch`` format: ``mp_rank_00/model_optim_rng.pt`` of models with Llama's layers.

The folders are ``mp_rank_TT``, or ``mp_rank_TT_PPP`` with several stages. Tensors get the names of transformers' Llama.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from tpcore.checkpoint.forms.pickles import top_of
from tpcore.checkpoint.forms.rank_files import Entries, Original, RankFiles, even_spec, grid
from tpcore.checkpoint.forms.source import Form, Reading, Source, inside
from tpcore.checkpoint.storage.files import damage, naming, read_file
from tpcore.errors import CheckpointError
from tpcore.layout.shard import ShardSpec

_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_FILE, _LATEST = "model_optim_rng.pt", "latest_checkpointed_iteration.txt"
# of whose classes nothing is needed but the attributes of ``args``
_PLACEHOLDERS = ("argparse", "megatron", "numpy", "_io", "types", "signal", "pathlib", "transformer_engine")
_NOT_READ = {"model", "args", "optimizer", "rng_state"}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV, _GATE_UP = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"), ("mlp.linear_fc1.weight",)
_OF_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    **{name: name for name in (*_QKV, *_GATE_UP)},  # split by ``originals``
}
_OF_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_DIMS = {"embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}


def _qkv(heads: int, kv_heads: int, interleaved: bool, shards: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parts of q, of k and of v in each rank's shard. ``interleaved``: for each kv head its query heads, key and
    value; otherwise q|k|v one after the other."""
    groups, each = kv_heads // len(shards), heads // kv_heads
    if interleaved:
        split = [t.unflatten(0, (groups, each + 2, -1)).split((each, 1, 1), 1) for t in shards]
        return ([parts[i].flatten(0, 2) for parts in split] for i in range(3))
    split = [t.unflatten(0, (groups * (each + 2), -1)).split((groups * each, groups, groups)) for t in shards]
    return ([parts[i].flatten(0, 1) for parts in split] for i in range(3))


class MegatronShards(RankFiles):
    """``first_layers``: the model's index of each stage's layer 0."""

    form = "Megatron-LM's shards"
    mixed = True

    def __init__(self, path: str, files: Sequence[Sequence[str]], how: Reading) -> None:
        super().__init__(path, files, how)
        tops = [_top(stage[0], how) for stage in files]
        self._qkv = partial(_qkv, *_projections(tops[0], files[0][0], self.tp))
        counts = [len({m[1] for m in map(_LAYER.fullmatch, top["model"]) if m}) for top in tops]
        self._first_layers = [sum(counts[:stage]) for stage in range(self.pp)]

    def read(self, file: str) -> tuple[Mapping[str, Any], Entries]:
        top = _top(file, self.how)
        stage = next(pp_rank for pp_rank, files in enumerate(self.files) if file in files)
        model = {
            _renamed(name, self._first_layers[stage], file): value
            for name, value in top["model"].items()
            if not name.endswith("_extra_state")
        }
        return model, {key: value for key, value in top.items() if key not in _NOT_READ}

    def spec(self, name: str, shape: tuple[int, ...], pp_rank: int) -> ShardSpec | None:
        dim = _DIMS.get(name.split(".")[-2]) if len(shape) == 2 else None
        return None if dim is None else even_spec(shape, self.tp, dim)

    def originals(self, states: Sequence[Mapping[str, Any]], pp_rank: int) -> tuple[list[Original], set[str]]:
        originals: list[Original] = []
        fused = {name for name in states[0] if name.endswith((*_QKV, *_GATE_UP))}
        for name in fused:
            try:
                originals += self._split(name, [state[name] for state in states])
            except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError) as e:
                raise CheckpointError(f"{self.path}: {name!r} is not as its args say: {e}") from e
        return originals, fused

    def _split(self, name: str, shards: Sequence[Tensor]) -> Iterator[Original]:
        if name.endswith(_GATE_UP):
            layer, halves = name.removesuffix(_GATE_UP[0]), [t.chunk(2) for t in shards]
            for i, part in enumerate(("gate", "up")):
                yield Original(f"{layer}mlp.{part}_proj.weight", 0, [h[i] for h in halves])
            return
        layer, _, end = name.partition("self_attention.linear_qkv.")
        for part, pieces in zip("qkv", self._qkv(shards), strict=True):
            yield Original(f"{layer}self_attn.{part}_proj.{end}", 0, pieces)


def _top(file: str, how: Reading) -> Mapping[str, Any]:
    top = top_of(file, how, placeholders=_PLACEHOLDERS)
    if not {"model", "args"} <= top.keys():
        raise CheckpointError(
            f"{file} has {sorted(map(str, top))[:6]}, without 'model' and 'args': one model a rank is read"
        )
    if not isinstance(top["model"], Mapping) or not all(isinstance(name, str) for name in top["model"]):
        raise CheckpointError(f"{file} is damaged: its model is no dict of names")
    if "language_model" in top["model"]:
        raise CheckpointError(f"{file} is of a model before megatron.core: convert it with Megatron-LM's tools first")
    return top


def _projections(top: Mapping[str, Any], file: str, tp: int) -> tuple[int, int, bool]:
    """The numbers of query and of kv heads, and whether the projections are interleaved."""
    with damage(file):
        args, version = vars(top["args"]), float(top.get("checkpoint_version", 0))
        heads = int(args["num_attention_heads"])
        kv_heads = int(args["num_query_groups"]) if args.get("group_query_attention") else heads
        if 1 <= version < 2 or kv_heads % tp or heads % kv_heads:
            raise CheckpointError(
                f"{file}: checkpoint_version={version}, {heads} heads, {kv_heads} kv heads, tp={tp}: not read"
            )
    wrong = {"swiglu": not args.get("swiglu"), "apply_layernorm_1p": bool(args.get("apply_layernorm_1p"))}
    if refused := [f"{name}={args.get(name)}" for name, is_wrong in wrong.items() if is_wrong]:
        raise CheckpointError(f"{file}: only models with Llama's layers are read, not {', '.join(refused)}")
    return heads, kv_heads, version >= 2


def _renamed(name: str, first_layer: int, file: str) -> str:
    match = _LAYER.fullmatch(name)
    known = _OF_MODEL.get(name) if match is None else _OF_LAYER.get(match[2])
    if known is None:
        raise CheckpointError(f"{file} holds {name!r}, which Llama in transformers has not: only its layers are read")
    return known if match is None else f"model.layers.{first_layer + int(match[1])}.{known}"


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    if not os.path.isdir(path):
        return None
    root, latest = path, os.path.join(path, _LATEST)
    if os.path.isfile(latest):
        with damage(latest):
            iteration = read_file(latest).decode().strip()
        root = os.path.join(path, f"iter_{int(iteration):07d}" if iteration.isdecimal() else "release")
    with naming("list", root):
        matches = [match for match in map(_RANK.fullmatch, sorted(os.listdir(root))) if match]
    files = {(int(m[2] or 0), int(m[1])): inside(root, os.path.join(m[0], _FILE), root) for m in matches}
    return MegatronShards(path, grid(root, files), how) if files else None


FORM = Form(sharded=True, open=_open)
