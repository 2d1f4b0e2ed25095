"""Names of dtypes in safetensors, and the bytes of a tensor."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ...errors import CheckpointError

# Only names that safetensors knew before 0.4.3, so that every version can read the files written here.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if re.fullmatch(r"[a-z0-9_]+", name) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def bytes_of(t: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = t.detach().as_strided((t.numel(),), (1,))  # not view(-1): dims of size 1 may have any stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def as_stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Dtype name and shape in the file. A dtype that safetensors has no name for is U8 with one more dim."""
    if dtype in _NAMES:
        return _NAMES[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]
