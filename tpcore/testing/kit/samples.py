"""Tensors that the conformance kit sends. They differ at each position of the group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def multiple(n: int, least: int = 4) -> int:
    """The smallest multiple of ``n`` from ``least`` on: a size that ``n`` ranks divide."""
    return n * -(-least // n)


def values(shape: tuple[int, ...], position: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which every dtype represents and sums exactly."""
    n = torch.Size(shape).numel()
    seven = (torch.arange(7) * (position + 3) + position) % 7
    period = (seven % 2 if dtype is torch.bool else seven).to(dtype)
    out = period.repeat(-(-n // 7))[:n].view(shape)
    return out * (1 + 2j) if dtype.is_complex else out


def wide(shape: tuple[int, ...], position: int, dtype: torch.dtype, size: int) -> Tensor:
    """Whole numbers from all of the range in which ``size`` of them have an exact sum, in any order."""
    if dtype is torch.bool:
        return values(shape, position, dtype)
    if dtype.is_floating_point:
        digits = round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item()) + 1
    else:
        digits = torch.iinfo(dtype).bits - dtype.is_signed
    top = 1 << max(1, digits - (size - 1).bit_length())
    # a multiplication by a large odd number spreads what follows each other over all 64 bits
    spread = (torch.arange(torch.Size(shape).numel()) + position * 10_007) * 0x5851F42D4C957F2D
    low = -top + 1 if dtype.is_signed else 0
    return ((spread >> 1) % (top - low) + low).to(dtype).view(shape)


LOST = ("the sign of zero", "NaN in a maximum", "denormal numbers")
"""Properties of odd numbers that a backend may declare as lost."""
HIGH = "more than 32 bits"
"""What a device may lose of whole numbers: their upper half."""


def lost_by(device: torch.device) -> tuple[str, ...]:
    """``HIGH``, if ``device`` loses it."""
    number = torch.tensor([1 << 40])
    return () if torch.equal(number.to(device).cpu(), number) else (HIGH,)


def kinds(dtype: torch.dtype, reduced: str) -> tuple[str, ...]:
    """Of numbers to send in a call, which is ``reduced`` by a sum or a maximum, or not."""
    if not reduced or dtype is torch.bool:
        return ("any",)
    if dtype.is_complex:
        return ("small",)
    if not dtype.is_floating_point:
        return "any", "whole"
    return ("any", "tiny", "whole", "near", "mixed") if reduced == "sum" else ("any", "whole", "near")


class Numbers:
    """Numbers for calls drawn at random, cut out of random bits of its own. Every sum of them has one right value, but
    of "mixed" ones: at most two ranks' numbers of an element are not zero, or all are whole and small. What is not
    ``eager`` computes as it moves: it gets no denormal numbers, and one NaN."""

    def __init__(self, seed: int, loses: Sequence[str], most: int, eager: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._bank = torch.randint(0, 256, (16 * most + (1 << 18),), generator=generator, dtype=torch.uint8)
        self._loses, self._eager = loses, eager
        self._denormal = eager and "denormal numbers" not in loses

    def of(
        self,
        kind: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        reduced: str,
        place: int,
        *,
        position: int,
        rank: int,
        size: int,
    ) -> Tensor:
        """What ``rank``, which is at ``position`` of ``size``, sends. ``place``: where the bits are cut out."""
        if dtype is torch.int64 and HIGH in self._loses:
            what = {"position": position, "rank": rank, "size": size}
            return self.of(kind, shape, torch.int32, reduced, place, **what).to(dtype)
        if kind in ("small", "whole"):
            sent = values(shape, rank + place % 7, dtype)
            return sent if kind == "small" else wide(shape, rank + place % 9973, dtype, size)
        if kind == "tiny":
            return values(shape, rank, dtype) * (
                torch.finfo(dtype).tiny * (torch.finfo(dtype).eps if self._denormal else 1)
            )
        n, at = torch.Size(shape).numel(), place + 104_729 * rank
        if dtype is torch.bool:
            return (self._bits(at, n) % 2).bool().view(shape)
        out = self._near(dtype, at, n, kind) if kind in ("near", "mixed") else self._any(dtype, at, n, reduced)
        if reduced == "sum" and kind != "mixed":
            turn = (torch.arange(n) + place - position) % size
            second = 1 + place % max(1, size - 1) if dtype.is_floating_point else 0
            out[(turn != 0) & (turn != second)] = 0
        if reduced == "max" and dtype.is_floating_point and "the sign of zero" not in self._loses:
            both = out[place % 5 :: 11]  # zeros on all ranks, of any sign
            both.copy_(torch.zeros_like(both).copysign(both))
        return out.view(shape)

    def _bits(self, at: int, count: int) -> Tensor:
        at = at * 16 % (len(self._bank) - count - 16) // 16 * 16
        return self._bank[at : at + count]

    def _any(self, dtype: torch.dtype, at: int, n: int, reduced: str) -> Tensor:
        """Any bits, and in every few elements what is special: not finite, denormal, the least and the largest."""
        out = self._bits(at, n * dtype.itemsize).view(dtype).clone()
        real = torch.view_as_real(out).view(-1) if dtype.is_complex else out
        if not real.is_floating_point() or real.dtype.itemsize < 2:
            return out
        info = torch.finfo(real.dtype)
        tiny, small, most = info.tiny, info.tiny * info.eps, info.max
        some = [math.nan, math.inf, 0.0, most, most / 2, tiny, small, 1 + info.eps]
        some += [-x for x in some]
        here = torch.arange(len(real))[at % 3 :: 2 + at % 7]
        real[here] = torch.tensor(some, dtype=torch.float64).to(real.dtype)[
            (torch.arange(len(here)) * 5 + at) % len(some)
        ]
        if "the sign of zero" in self._loses:
            real[real == 0] = 0
        if not self._eager or (reduced and not self._denormal):
            real[real.abs() < tiny / info.eps] = 0  # nor is the difference of two
        lost = reduced == "max" and "NaN in a maximum" in self._loses
        if lost or not self._eager:
            real[real.isnan()] = 0.0 if lost else math.nan
        return out

    def _near(self, dtype: torch.dtype, at: int, n: int, kind: str) -> Tensor:
        """Numbers so near each other that sums are rounded, half-way too."""
        bits, digits = self._bits(at, 8 * n).view(torch.int64), -round(math.log2(torch.finfo(dtype).eps))
        apart = 2 if kind == "mixed" else digits + 3
        size = (1 + (bits & ((1 << digits) - 1)) * 2.0**-digits) * 2.0 ** -((bits >> 55) % apart)
        return torch.where(bits < 0, -size, size).to(dtype)
