"""Files of torch.save, read without running code in them."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import nested
from ...errors import CheckpointError
from ..storage.files import open_regular
from ..storage.tensorfile import check_dims
from ..stored import MemoryShard
from ..tree import is_nested, is_optimizer, leaves
from .source import Reading

_DEEPEST = 100  # levels, as in a tpcore checkpoint
_ITEMS = 10_000_000
_TIMES = 16  # how often tensors may share one storage; tied weights do it two or three times
_REPEATED = 64 << 20  # bytes by which a tensor may exceed its storage


class Placeholder:
    """Stands for an object whose class is not imported: its attributes, without what it was made from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def unpickled(path: str, how: Reading, allow: Sequence[type] = (), placeholders: Sequence[str] = ()) -> Any:
    """Load a torch file without running code in it; a Placeholder stands for each object of ``placeholders``."""
    if not how.trust:
        raise CheckpointError(
            f"{path} is a pickle, which trust=False (--no-trust) does not read: where it is trusted, "
            "write its tensors as safetensors"
        )
    if not how.quiet and tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
        warnings.warn(
            f"{path} is a pickle, and before torch 2.10 (this is {torch.__version__}) one can run code in "
            "spite of weights_only=True (CVE-2026-24747): trust who made it, or make safetensors of it "
            "elsewhere",
            stacklevel=2,
        )
    os.close(open_regular(path))
    try:
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is truncated: its directory, which is at its end, is missing")
        with zipfile.ZipFile(path) as records:
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
                raise CheckpointError(  # torch would take compressed bytes for values
                    f"{path} has compressed records, which cannot be read in part: "
                    "write it anew, torch.save(torch.load(path, weights_only=True), path)"
                )
            allowed: list[Any] = [*allow, *_placeholders(records, placeholders)]
        with torch.serialization.safe_globals(allowed):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_extent(path, value)
        return value
    except CheckpointError:
        raise
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"{path} holds something besides tensors and plain values, and unpickling that could run code: "
            "save the state_dict alone"
        ) from e
    except Exception as e:  # torch.load may raise anything for a damaged file
        reason = (str(e).splitlines() or [""])[0][:200]
        raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {reason}") from e


def _placeholders(records: zipfile.ZipFile, packages: Sequence[str]) -> list[type]:
    """A subclass of Placeholder for each name from ``packages`` in a pickle."""
    if not packages:
        return []
    record = next(name for name in records.namelist() if name.endswith("data.pkl"))
    opcodes = pickletools.genops(records.read(record))
    named = {str(arg) for opcode, arg, _ in opcodes if opcode.name == "GLOBAL"}
    pairs = [text.split(" ", 1) for text in sorted(named) if re.split("[ .]", text)[0] in packages]
    return [type(name, (Placeholder,), {"__module__": module}) for module, name in pairs]


def top_of(path: str, how: Reading, allow: Sequence[type] = (), placeholders: Sequence[str] = ()) -> Mapping[Any, Any]:
    """The dict in a file. CheckpointError if it holds anything else."""
    top = unpickled(path, how, allow, placeholders)
    if not isinstance(top, Mapping):
        raise CheckpointError(f"{path} holds a {type(top).__name__}, not a dict of tensors")
    return top


def parted(top: Mapping[Any, Any], how: Reading, path: str) -> tuple[Mapping[Any, Any], dict[Any, Any]]:
    """The entry ``how.model_key`` and the other entries; ``top`` and no others if it is a model's state."""
    if not is_nested(top, how.model_key, path):
        return top, {}
    return top[how.model_key], {key: value for key, value in top.items() if key != how.model_key}


def mapped(t: Tensor, name: str, path: str) -> MemoryShard:
    """A tensor of a torch file as a shard. CheckpointError for sparse, quantized and meta tensors."""
    if _is_special(t):
        raise CheckpointError(f"{path}: {name!r} is of layout {t.layout}, dtype {t.dtype} on {t.device}")
    check_dims(t.ndim, f"{path}: {name!r}")
    return MemoryShard(t)


def _is_special(t: Tensor) -> bool:
    return t.layout != torch.strided or t.is_quantized or t.is_meta


def in_own_memory(value: Any) -> Any:
    """``value`` with copies of its tensors: a mapped tensor would change, or fault, with its file."""
    return nested.mapped(torch.clone, value)


def _check_extent(path: str, top: Any) -> None:
    """CheckpointError for a value that is too large or deep with its shared parts counted at each use: a small pickle
    can repeat one item 2**32 times."""
    seen: dict[int, tuple[int, int]] = {}
    memory: dict[int, int] = {}

    def measure(value: Any, above: tuple[int, ...], name: Any) -> tuple[int, int]:
        if isinstance(value, Tensor) and not _is_special(value):
            storage = value.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
            if value.nbytes > storage.nbytes() + _REPEATED:  # strides of 0
                raise CheckpointError(f"{path}: {name!r} repeats {storage.nbytes()} bytes to {value.nbytes}")
            return 1, value.nbytes
        if not isinstance(value, Mapping | list | tuple):
            return 1, 0
        if id(value) not in seen:
            if len(above) > _DEEPEST or id(value) in above:
                raise CheckpointError(f"{path} is nested more than {_DEEPEST} deep, or holds itself")
            named = value.items() if isinstance(value, Mapping) else enumerate(value)
            sizes = [measure(item, (*above, id(value)), key) for key, item in named]
            seen[id(value)] = 1 + sum(n for n, _ in sizes), sum(size for _, size in sizes)
        return seen[id(value)]

    items, size = measure(top, (), "")
    loaded = sum(memory.values())
    if items > _ITEMS or size > _TIMES * loaded + _REPEATED:
        raise CheckpointError(f"{path} repeats what it holds to {items} items and {size} bytes, from {loaded} bytes")


def unsound(path: str) -> Iterator[str]:
    """An error text for the first damaged record of a torch.save file. Nothing for other files."""
    try:
        if os.path.isfile(path) and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as records:
                if (wrong := records.testzip()) is not None:
                    yield f"{path} is damaged: its {wrong!r} has another crc32"
    except Exception as e:  # noqa: BLE001  zipfile may raise anything for a damaged file
        yield f"{path} is damaged: {type(e).__name__}: {e}"


def differing(rests: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """The keys of entries that are not the same on all ranks. ``rests``: entries per rank. An optimizer's state counts
    as different: it is sharded like its parameters, even if all values are zero."""
    first, *others = rests
    return [
        key
        for key, value in first.items()
        if is_optimizer(value) or not all(key in rest and _same(value, rest[key]) for rest in others)
    ]


def _same(a: Any, b: Any) -> bool:
    x, y = dict(leaves(a)), dict(leaves(b))  # in any order
    return x.keys() == y.keys() and all(equal(x[path], y[path]) for path in x)


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same. One without values, or special in another way, is none's equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and not (_is_special(a) or _is_special(b)) and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
