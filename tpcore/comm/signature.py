"""Descriptions of collective calls, and the check that all ranks of a group make the same call."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType

import torch

from .. import settings
from ..errors import CollectiveMismatchError
from ..extras import module_spec

ALL = sys.maxsize
_WARMUP = 512
_TEXT = 4096  # bytes of a packed Call
_SITE = 1000  # characters of a call site that are sent: the end of the path is the useful part

Site = tuple[CodeType, int]
"""A place in the code, as cheap to take as possible: it is formatted only for a message."""

Caller = tuple[CodeType, int, int, int]
"""A site, and the layer whose forward makes the call: its number of how many on its group; 0 and 0 without one."""


@cache
def library() -> tuple[str, ...]:
    """How the paths of files begin that are tpcore's, torch's, or of a package that is plugged into tpcore."""
    groups = entry_points()
    points = (*groups.select(group="tpcore"), *groups.select(group="tpcore.extensions"))
    found = [module_spec(name) for name in {point.module.partition(".")[0] for point in points}]
    # a plugin of one file may lie beside a user's own
    packages = [folder for spec in found if spec is not None for folder in spec.submodule_search_locations or ()]
    files = sorted(spec.origin for spec in found if spec and spec.origin and not spec.submodule_search_locations)
    folders = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), *sorted(packages)
    return (*(folder + os.sep for folder in folders), *files, "<frozen", "<eval")


def call_site(*also: str) -> Site:
    """Innermost frame outside of ``library`` and of files whose path starts with one of ``also``."""
    return call_place(*also)[:2]


def call_place(*also: str) -> Caller:
    """``call_site``, and the innermost layer whose forward makes the call, which tells calls of one loop apart."""
    skip, layer = (*library(), *also) if also else library(), (0, 0)
    frame = outermost = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("self",) and layer == (0, 0):
            owner = frame.f_locals.get("self")
            layer = owner.numbered if hasattr(type(owner), "numbered") else layer  # type: ignore[union-attr]
        if not code.co_filename.startswith(skip):
            return code, frame.f_lineno, *layer
        outermost, frame = frame, frame.f_back  # type: ignore[assignment]
    return outermost.f_code, outermost.f_lineno, *layer


def word_of(key: object) -> int:
    """A 64-bit hash of ``key``, the same on all ranks."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def place_of(op: str, place: Caller) -> int:
    """A 64-bit word: a hash of the line that calls ``op``, and the layer. Without the folder."""
    code, line, number, count = place
    word = word_of((op, os.path.basename(code.co_filename), line, code.co_name)) & 0xFFFFFFFF
    return (word or 1) << 32 | (count & 0xFFFF) << 16 | number & 0xFFFF


class Places:
    """Finds swapped calls: calls that are equal on all ranks, but are made from different places. Different places
    alone are no error: two branches of ``if ctx.rank == 0`` may make one call. Calls are swapped if a rank calls
    from a place that another has used before, while that one calls from elsewhere; or if two ranks are in different
    layers, unless one has made more layers than another."""

    def __init__(self) -> None:
        self._common: set[int] = set()
        self._of: dict[int, set[int]] = {}

    def swapped(self, members: Sequence[int], places: Sequence[int]) -> bool:
        """``places``: one call's place on each of ``members``; 0 for a rank that did not look it up."""
        if places.count(places[0]) == len(places):
            self._common.add(places[0] >> 32)
            return False
        if 0 in places:
            return False
        if len({place >> 16 & 0xFFFF for place in places}) == 1:
            numbers = {place & 0xFFFF for place in places}
            if len(numbers) > 1 and 0 not in numbers:
                return True
        lines = [place >> 32 for place in places]
        visited = [self._of.setdefault(m, set()) for m in members]
        swapped = any(
            there != here and (there in self._common or there in before)
            for there in lines
            for here, before in zip(lines, visited, strict=True)
        )
        for before, here in zip(visited, lines, strict=True):
            before.add(here)
        return swapped


def checked_calls() -> int:
    """How many collectives of each group to check before they run, from ``TPCORE_CHECK``. ``always``: ALL, and the
    same call from two places of the program counts as a difference too. ``off``: none. ``warmup``, the default: the
    first 512; later calls are compared without a wait. It is a count and not a time, so that all ranks of a group
    stop at the same call."""
    return {"always": ALL, "warmup": _WARMUP, "off": 0}[settings.CHECK.get()]


@dataclass(frozen=True)
class Call:
    """One collective that one rank is about to make. Equal calls may run; the site is for messages only."""

    seq: int
    op: str  # with its reduction and dim: "all_reduce sum", "all_gather dim 0"
    shape: tuple[int, ...]
    dtype: str
    site: str = field(compare=False)

    @classmethod
    def of(cls, seq: int, op: str, shape: Sequence[int], dtype: torch.dtype, at: Caller | None) -> Call:
        where = "" if at is None else f"{at[0].co_filename}:{at[1]} in {at[0].co_name}"
        if at is not None and at[2]:
            where += f", layer {at[2]} of {at[3]} on this group"
        return cls(seq, op, tuple(shape), str(dtype).removeprefix("torch."), where)

    def key(self, place: bool) -> tuple[object, ...]:
        """What ranks must agree on. With ``place`` also the call site: file name, line and function."""
        return (self.seq, self.op, self.shape, self.dtype, os.path.basename(self.site) if place else "")

    def pack(self) -> bytes:
        """The call as JSON to send: at most 4096 bytes, because no tensor has more than 64 dims."""
        site = self.site.encode()[-_SITE:].decode(errors="replace")
        return json.dumps([self.seq, self.op, self.shape, self.dtype, site], ensure_ascii=False).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Call:
        seq, op, shape, dtype, site = json.loads(data)
        return cls(seq, op, tuple(shape), dtype, site)

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site else ""
        return f"#{self.seq} {self.op} of {self.dtype} {list(self.shape)}{where}"


def disagreement(calls: Sequence[Call], ranks: Sequence[int], place: bool = False, ended: str = "") -> str:
    """A message that names the first rank whose call differs; if none: that some ``ended``, or hash in other ways."""
    for rank, call in zip(ranks[1:], calls[1:], strict=True):
        if call.key(place) != calls[0].key(place):
            return (
                f"ranks {ranks[0]} and {rank} of group {tuple(ranks)} disagree on their next collective:\n"
                f"  rank {ranks[0]}: {calls[0]}\n  rank {rank}: {call}\n"
                "Every rank of a group must make the same collectives in the same order, also to save, generate or "
                "evaluate: no rank alone."
            )
    return ended or (
        f"the ranks' hashes of their next collective differ, but the calls are equal: {calls[0]}\n"
        "Do all ranks run the same versions of tpcore and Python?"
    )


def compare(calls: Sequence[Call], ranks: Sequence[int], exchange: Callable[[bytes], bytes], place: bool) -> None:
    """Raise CollectiveMismatchError on all ``ranks`` unless all make these calls: it describes the first that
    differs. ``place``: the call sites must agree too. ``exchange`` concatenates the ranks' bytes, all of one length;
    collective."""
    local = b"".join(word_of(call.key(place)).to_bytes(8, "little") for call in calls)
    gathered = exchange(local)
    for i, call in enumerate(calls):
        span = slice(8 * i, 8 * i + 8)
        if any(gathered[start:][span] != local[span] for start in range(0, len(gathered), len(local))):
            texts = exchange(call.pack().ljust(_TEXT))
            rank_calls = [Call.unpack(texts[n : n + _TEXT]) for n in range(0, len(texts), _TEXT)]
            raise CollectiveMismatchError(disagreement(rank_calls, ranks, place))
