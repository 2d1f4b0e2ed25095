"""Buckets: groups of tensors that one collective moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def buckets(
    items: Iterable[T], kind: Callable[[T], Hashable], nbytes: Callable[[T], int], most: int
) -> Iterator[list[T]]:
    """Lists of items of one kind, in order, of up to ``most`` bytes each; a larger item is alone."""
    by_kind: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        by_kind[kind(item)].append(item)
    for members in by_kind.values():
        bucket: list[T] = []
        size = 0
        for item in members:
            if bucket and size + nbytes(item) > most:
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += nbytes(item)
        yield bucket
