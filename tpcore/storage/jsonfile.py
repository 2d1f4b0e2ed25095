"""Strict JSON, and the records of files that a manifest in it keeps."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

from ..errors import CheckpointError

MANIFEST = "manifest.json"
PREFIX = "tp_rank_"


class FileRecord(NamedTuple):
    size: int
    crc32: str  # 8 hex digits


def dumps(value: Any, indent: int | None = None) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()


def loads(data: bytes, path: str) -> Any:
    """Strict JSON: no NaN, no infinity."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as e:  # ValueError: bad UTF-8 and bad JSON alike
        raise CheckpointError(f"{path} is damaged: {e}") from e
