"""The crc32 of parts put together, from theirs: no byte is summed twice."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

# Polynomials over GF(2) modulo the one of crc32, the coefficient of x**k in bit 31 - k; zlib's crc32_combine
# (crc32.c) is the source of the algorithm.
_MODULUS, _ONE, _X8 = 0xEDB88320, 1 << 31, 1 << 23


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """crc32 of the concatenation of parts, of each of which (crc32, bytes) is given."""
    total = 0
    for crc, size in parts:
        total = _times(_shift(size), total) ^ crc
    return total


def spelled(crc: int) -> str:
    """As it goes on record."""
    return f"{crc:08x}"


@lru_cache(maxsize=256)  # a model has many tensors of few sizes
def _shift(size: int) -> int:
    """x ** (8 size)"""
    out, base = _ONE, _X8
    while size:
        if size & 1:
            out = _times(out, base)
        base = _times(base, base)
        size >>= 1
    return out


def _times(a: int, b: int) -> int:
    out = 0
    while a:
        if a & _ONE:
            out ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_MODULUS if b & 1 else 0)
    return out
