"""Checkpoints of one file, as torch and safetensors write them."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..shard import ShardSpec
from .files import naming
from .stored import FileShard, MemoryShard, Shard, Stored
from .tensorfile import TensorFile
from .tree import is_nested

State = dict[str, Any]
"""A model's state by name: a Stored for every tensor, anything else as it is."""


def open_file(
    path: str, model_key: str | None, stack: ExitStack, *, quiet: bool
) -> tuple[State, dict[Any, Any]]:
    """The model in a ``.safetensors`` or torch file, and the rest of the file. Reads no parameter yet.

    ``quiet``: another rank warns.
    """
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a directory: sharded=False is for one unsharded file")
    with naming("open", path), open(path, "rb") as f:
        magic = f.read(4)
    if path.endswith(".safetensors"):
        return _safetensors(path, stack), {}
    if magic == b"PK\x03\x04":
        return _torch(path, model_key, quiet)
    if magic[:1] == b"\x80":
        raise CheckpointError(
            f"{path} has the form that torch wrote before 1.6, which cannot be read in part: "
            "write it anew, torch.save(torch.load(path, weights_only=True), path)"
        )
    raise CheckpointError(f"{path} is neither a .safetensors file nor one that torch.save has written")


def _stored(where: str, shard: Shard) -> Stored:
    return Stored(where, ShardSpec(shard.shape), 1, None, lambda _: shard)


def _safetensors(path: str, stack: ExitStack) -> State:
    file = TensorFile(path)
    stack.callback(file.close)
    return {name: _stored(name, FileShard(file, file.layout(name))) for name in file.names()}


def _torch(path: str, model_key: str | None, quiet: bool) -> tuple[State, dict[Any, Any]]:
    if not quiet and _version() < (2, 10):
        warnings.warn(
            f"{path} is a pickle, and before torch 2.10 (this is {torch.__version__}) one can run code in "
            "spite of weights_only=True (CVE-2026-24747): use a .safetensors file, or trust who made it",
            stacklevel=2,
        )
    found = _unpickled(path)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict of tensors")
    nested = is_nested(found, model_key, path, partial(_is, Mapping), partial(_is, Tensor))
    rest = {key: _own(value) for key, value in found.items() if key != model_key} if nested else {}
    state = {}
    for name, value in (found[model_key] if nested else found).items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a model's state has names, not {name!r}")
        state[name] = _stored(name, _mapped(value, name, path)) if isinstance(value, Tensor) else value
    return state, rest


def _mapped(t: Tensor, name: str, path: str) -> MemoryShard:
    if t.layout != torch.strided or t.is_quantized or t.is_meta:
        raise CheckpointError(f"{path}: {name!r} is of layout {t.layout}, dtype {t.dtype} on {t.device}")
    return MemoryShard(t)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _own(value: Any) -> Any:
    """The same with tensors in memory of their own: a mapped one would change, or fault, with the file."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(_own(item) for item in value)
    if isinstance(value, Mapping):
        return type(value)((key, _own(item)) for key, item in value.items())  # type: ignore[call-arg]
    return value


def _unpickled(path: str) -> Any:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is truncated: its directory, which is at its end, is missing")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"{path} holds something besides tensors and plain values, and unpickling that could run code: "
            f"save the state_dict alone ({str(e).splitlines()[0][:200]})"
        ) from e
    except Exception as e:  # a damaged file makes torch.load raise whatever its bytes happen to mean
        raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {str(e).splitlines()[0][:200]}") from e


def _version() -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
