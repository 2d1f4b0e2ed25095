"""Tensors that the conformance kit sends. They differ at each position of the group."""

from __future__ import annotations

import torch
from torch import Tensor


def multiple(n: int, least: int = 4) -> int:
    """The smallest multiple of ``n`` from ``least`` on: a size that ``n`` ranks divide."""
    return n * -(-least // n)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def bits(shape: tuple[int, ...], position: int, dtype: torch.dtype, *, normal: bool = False) -> Tensor:
    """Random bits, a signalling NaN, a denormal number and -0 first; with ``normal`` such numbers are 1."""
    n = torch.Size(shape).numel()
    random = torch.Generator().manual_seed(position + 1)
    out = torch.randint(0, 256, (n * dtype.itemsize,), generator=random, dtype=torch.uint8)
    if dtype is torch.bool:
        return (out % 2).bool().view(shape)
    real = dtype.to_real() if dtype.is_complex else dtype
    if real.is_floating_point and real.itemsize in _INTEGERS:
        integers = out.view(_INTEGERS[real.itemsize])
        infinity = torch.full((1,), torch.inf, dtype=real).view(integers.dtype)
        integers[0], integers[1], integers[2] = infinity.item() + 1, 1, torch.iinfo(integers.dtype).min
    if normal and real.is_floating_point:
        numbers = out.view(real).double()
        odd = ~(numbers.isfinite() & (numbers.abs() >= torch.finfo(real).tiny))
        out.view(-1, real.itemsize)[odd] = torch.ones(1).to(real).view(torch.uint8)
    return out.view(dtype).view(shape)
