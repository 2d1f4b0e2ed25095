"""Unsharded checkpoints: a file of torch or safetensors, or a Hugging Face directory of such."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...shard import ShardSpec
from ...storage.files import naming
from ...storage.tensorfile import TensorFile
from ..format.stored import FileShard, MemoryShard, Shard, Stored
from ..format.tree import is_nested
from .huggingface import weight_files

_REPEATED = 64 << 20  # bytes of a tensor beyond those of its memory

State = dict[str, Any]
"""A model's state by name: a Stored for every tensor, anything else as it is."""


@dataclass(frozen=True)
class Reading:
    """How files that others wrote are read. ``quiet``: another rank warns; ``trust``: of pickles at all."""

    model_key: str | None = "model"
    trust: bool = True
    quiet: bool = False


def open_unsharded(path: str, how: Reading, stack: ExitStack) -> tuple[State, dict[Any, Any]]:
    """The model in a file or directory, and the rest of a torch file, mapped. Reads no parameter yet."""
    if not os.path.isdir(path):
        return _open_file(path, how, stack)
    files = weight_files(path)
    if files is None:
        raise CheckpointError(
            f"{path} is a directory without model.safetensors or pytorch_model.bin, or an index of either"
        )
    state: State = {}
    for file, names in files.items():
        found, _ = _open_file(file, how, stack)
        missing = sorted((names or set()) - found.keys())
        if missing:
            raise CheckpointError(f"{file} has no {missing[0]!r}, which the index says it has")
        state.update((name, item) for name, item in found.items() if names is None or _of(name, item, names))
    return state, {}


def _of(name: str, item: Any, names: set[str]) -> bool:
    """Whether the index has it, or the tensor that it is another name of."""
    return (item.where if isinstance(item, Stored) else name) in names


def _open_file(path: str, how: Reading, stack: ExitStack) -> tuple[State, dict[Any, Any]]:
    with naming("open", path), open(path, "rb") as f:
        magic = f.read(4)
    if path.endswith(".safetensors"):
        return _safetensors(path, stack), {}
    if magic == b"PK\x03\x04":
        return _torch(path, how)
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
    state = {name: _stored(name, FileShard(file, file.layout(name))) for name in file.names()}
    # what tied weights that are stored once are called besides: safetensors.torch.save_model's convention
    return state | {
        other: state[name] for other, name in file.metadata.items() if other not in state and name in state
    }


def _torch(path: str, how: Reading) -> tuple[State, dict[Any, Any]]:
    found = unpickled(path, how)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict of tensors")
    nested = is_nested(found, how.model_key, path, partial(_is, Mapping), partial(_is, Tensor))
    rest = {key: value for key, value in found.items() if key != how.model_key} if nested else {}
    return in_memory(found[how.model_key] if nested else found, path), rest


def in_memory(state: Mapping[Any, Any], path: str) -> State:
    """A whole model's state whose tensors are there already, mapped or not."""
    found: State = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a model's state has names, not {name!r}")
        found[name] = _stored(name, mapped(value, name, path)) if isinstance(value, Tensor) else value
    return found


def mapped(t: Tensor, name: str, path: str) -> MemoryShard:
    if t.layout != torch.strided or t.is_quantized or t.is_meta:
        raise CheckpointError(f"{path}: {name!r} is of layout {t.layout}, dtype {t.dtype} on {t.device}")
    if t.nbytes > t.untyped_storage().nbytes() + _REPEATED:  # strides of 0 make much of little
        raise CheckpointError(f"{path}: {name!r} repeats {t.untyped_storage().nbytes()} bytes to {t.nbytes}")
    return MemoryShard(t)


def unsound(path: str) -> Iterator[str]:
    """Whether all of a file of torch.save has the crc32 that is on record in it. Nothing of other files."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as records:
            wrong = records.testzip()
    except Exception as e:  # noqa: BLE001  a damaged file makes zipfile raise whatever its bytes mean
        yield f"{path} is damaged: {type(e).__name__}: {e}"
        return
    if wrong is not None:
        yield f"{path} is damaged: its {wrong!r} has another crc32"


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def own(value: Any) -> Any:
    """The same with tensors in memory of their own: a mapped one would change, or fault, with the file."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(own(item) for item in value)
    if isinstance(value, Mapping):
        return type(value)((key, own(item)) for key, item in value.items())  # type: ignore[call-arg]
    return value


def unpickled(path: str, how: Reading, allow: Sequence[type] = ()) -> Any:
    """A torch file by torch's restricted unpickler: tensors, plain values and the classes in ``allow``."""
    if not how.trust:
        raise CheckpointError(
            f"{path} is a pickle and trust=False: `tpcore checkpoint convert` makes safetensors of it"
        )
    if not how.quiet and _version() < (2, 10):
        warnings.warn(
            f"{path} is a pickle, and before torch 2.10 (this is {torch.__version__}) one can run code in "
            "spite of weights_only=True (CVE-2026-24747): trust who made it, or make safetensors of it "
            "elsewhere with `tpcore checkpoint convert`",
            stacklevel=2,
        )
    try:
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is truncated: its directory, which is at its end, is missing")
        with torch.serialization.safe_globals(list(allow)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"{path} holds something besides tensors and plain values, and unpickling that could run code: "
            f"save the state_dict alone ({str(e).splitlines()[0][:200]})"
        ) from e
    except Exception as e:  # a damaged file makes torch.load raise whatever its bytes happen to mean
        said = (str(e).splitlines() or [""])[0][:200]
        raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {said}") from e


def _version() -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
