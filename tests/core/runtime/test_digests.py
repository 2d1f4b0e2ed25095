"""What a checked run compares of float inputs: other data is told apart, another rounding is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tpcore.runtime.digests import Note, digest, first_difference


def _notes(t: Tensor) -> list[Note]:
    return [("the input", digest(t))]


def _differ(a: Tensor, b: Tensor) -> bool:
    return first_difference([_notes(a), _notes(b)]) is not None


def _data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _features_permuted(t: Tensor) -> Tensor:
    return t[..., torch.randperm(t.shape[-1], generator=torch.Generator().manual_seed(1))]


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "sign flipped": torch.neg,
    "features permuted": _features_permuted,
    "features in reverse": lambda t: t.flip(-1),
    "tokens permuted": lambda t: t.flip(0),
    "other data": lambda t: _data(*t.shape, seed=2),
}


@pytest.mark.parametrize("shape", [(4096, 1024), (64, 64), (3, 5)], ids=str)
@pytest.mark.parametrize("name", OTHER)
def test_other_data_differs(name: str, shape: tuple[int, ...]) -> None:
    data = _data(*shape)
    assert _differ(data, OTHER[name](data))


@pytest.mark.parametrize("shape", [(4096, 1024), (64, 64), (3, 5), (1,), (), (0,)], ids=str)
def test_the_same_data_with_another_rounding_passes(shape: tuple[int, ...]) -> None:
    data = _data(*shape)
    assert not _differ(data, data.clone())
    rounded = data.bfloat16()
    assert not _differ(data, rounded.float())
    sign = torch.where(torch.arange(data.numel()).view(shape) % 3 < 1, 2.0, -1.0)  # of mean 0
    assert not _differ(rounded, (data * (1 + sign * 2.0**-9)).bfloat16())  # by an ulp at most


def test_noise_where_the_data_has_zeros_passes() -> None:
    """Entries at the places of the sample may be rounding alone, as of a difference of equal values."""
    data = torch.zeros(64, 64)
    data[:, ::64] = 1.0
    assert not _differ(data + 1e-9, data - 1e-9)


def test_values_that_are_not_finite_do_not_hide_the_rest() -> None:
    data = _data(64, 64)
    data[0, 0] = float("nan")
    assert not _differ(data, data.clone())
    assert _differ(data, -data)


@pytest.mark.parametrize("largest", [torch.finfo(d).min for d in (torch.float64, torch.float32)])
def test_the_largest_numbers_are_themselves(largest: float) -> None:
    """As in masks; of float64 they become infinite in four digits."""
    mask = torch.full((8, 8), largest, dtype=torch.float64).triu(1)
    assert not _differ(mask, mask.clone())


def test_masks_of_many_pieces_are_told_apart() -> None:
    mask = torch.ones(1100, 1000, dtype=torch.bool)
    other = mask.clone()
    other[-1, -1] = False
    assert not _differ(mask, mask.clone())
    assert _differ(mask, other)


def _bits(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(torch.int8).view(dtype)


SMALL = "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "int4"
OF_ANY_KIND: dict[str, Callable[[Tensor], Tensor]] = {
    "quantized": lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8),
    "quantized by channel": lambda t: torch.quantize_per_channel(t, torch.ones(4), torch.zeros(4), 0, torch.quint8),
    "complex": lambda t: torch.complex(t, t).conj(),
    "imaginary": lambda t: torch.complex(t, t).conj().imag,  # whose sign is lazy
    "bools": lambda t: t > 8,
    "unsigned": lambda t: t.to(torch.uint16),
    **{name: _bits(getattr(torch, name)) for name in SMALL if hasattr(torch, name)},
    "bits": lambda t: t.to(torch.int16).view(torch.bits16).t(),
    "of a class": lambda t: t.as_subclass(Unreadable),
}
WITHOUT_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "compressed": Tensor.to_sparse_csr,
    "of a library": Tensor.to_mkldnn,
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "wrapped": lambda t: TwoTensor(t, t),
}


class Unreadable(Tensor):
    """Has functions of its own for all that torch has."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Tensor:
        raise TypeError


@pytest.mark.filterwarnings("ignore")  # prototypes of torch, it says
@pytest.mark.parametrize("kind", [*OF_ANY_KIND, *WITHOUT_MEMORY])
def test_tensors_of_any_kind(kind: str) -> None:
    make = (OF_ANY_KIND | WITHOUT_MEMORY)[kind]
    data = torch.arange(16.0).reshape(4, 4)
    other = data.clone()
    other[2, 1] = 3.0
    assert not _differ(make(data), make(data.clone()))
    assert _differ(make(data), make(other)) == (kind in OF_ANY_KIND)
