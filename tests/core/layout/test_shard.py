"""The law of ShardSpec, for any shape, cut and degree: moving a tensor between degrees loses nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpcore.layout.shard import Block, ShardSpec

DEGREES = st.integers(1, 8)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    unit = draw(st.integers(1, 3))
    return Block(unit * draw(st.integers(0, 9)), unit, draw(st.booleans()))


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    if not shape or draw(st.integers(0, 9)) == 0:
        return ShardSpec(tuple(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    parts = tuple(draw(st.lists(blocks(), min_size=1, max_size=4)))
    shape[dim] = sum(b.size for b in parts)
    return ShardSpec(tuple(shape), dim, parts)


def fits(spec: ShardSpec, n: int) -> bool:
    """Whether n ranks can hold it: fewer units than ranks are replicated a whole number of times."""
    units = [b.size // b.unit for b in spec.blocks if b.replicate]
    return all(u == 0 or u >= n or n % u == 0 for u in units)


def full_of(spec: ShardSpec) -> Tensor:
    """Distinct and not zero, so that padding and misplaced entries show."""
    return torch.arange(1, math.prod(spec.shape) + 1).reshape(spec.shape)


def check(spec: ShardSpec, n: int) -> None:
    """``unshard . shard = id``, and the index tables say the same."""
    full = full_of(spec)
    shards = [spec.shard(full, r, n) for r in range(n)]
    assert all(tuple(s.shape) == spec.local_shape(n) for s in shards)
    assert torch.equal(spec.unshard(shards), full)
    if spec.dim is None:
        return
    source, gathered = spec.source_index(n), spec.gathered_index(n)
    for shard, index in zip(shards, source, strict=True):
        held = index >= 0
        assert torch.equal(
            shard.index_select(spec.dim, held.nonzero().flatten()), full.index_select(spec.dim, index[held])
        )
        assert not shard.index_select(spec.dim, (~held).nonzero().flatten()).any()
    assert torch.equal(torch.cat(shards, spec.dim).index_select(spec.dim, gathered), full)
    assert spec.padded(n) == bool((source < 0).any())
    if spec.contiguous(n):
        assert torch.equal(torch.cat(shards, spec.dim), full)


@given(specs(), DEGREES)
@settings(max_examples=300)
def test_law(spec: ShardSpec, n: int) -> None:
    assume(fits(spec, n))
    check(spec, n)


@given(specs(), DEGREES)
def test_copies_counts_how_many_ranks_hold_an_entry(spec: ShardSpec, n: int) -> None:
    assume(fits(spec, n))
    if spec.dim is None:
        assert spec.copies(n) == n
        return
    index = spec.source_index(n)
    held = torch.bincount(index[index >= 0], minlength=spec.shape[spec.dim])
    try:
        copies = spec.copies(n)
    except ValueError as e:
        assert "not alike" in str(e)  # noqa: PT017  whether it raises depends on the spec
        assert len({b.size for b in spec.blocks if b.replicate}) + len(spec.blocks) > 1
    else:
        assert (held == copies).all()


@given(specs(), DEGREES)
def test_sharding_owns_its_memory(spec: ShardSpec, n: int) -> None:
    assume(fits(spec, n))
    full = full_of(spec)
    shard = spec.shard(full, n - 1, n)
    shard.zero_()
    assert torch.equal(full, full_of(spec))
    assert shard.is_contiguous()


def test_whole_heads_and_repeated_ones() -> None:
    # 10 query heads of 4 over 4 ranks: 3, 3, 3 and 1; 2 key heads: each on 2 ranks
    spec = ShardSpec((48, 1), 0, (Block(40, 4), Block(8, 4, replicate=True)))
    held = spec.source_index(4)
    assert spec.local_shape(4) == (16, 1)
    assert held[0].tolist() == [*range(12), *range(40, 44)]
    assert held[1].tolist() == [*range(12, 24), *range(40, 44)]
    assert held[2].tolist() == [*range(24, 36), *range(44, 48)]
    assert held[3].tolist() == [*range(36, 40), *[-1] * 8, *range(44, 48)]
    assert spec.padded(4)
    assert not spec.padded(2)


def test_strided_cuts_each_part_by_itself() -> None:
    spec = ShardSpec.strided((6, 2), 0, 3)
    assert spec.source_index(2).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert not spec.contiguous(2)
    assert ShardSpec.strided((6, 2), 0).contiguous(2)


def test_equal_cuts_share_their_tables() -> None:
    """As the layers of a model do: tables of their own took 37 MB for 80 large layers."""
    one, two = (ShardSpec.strided((6,), 0, 3) for _ in range(2))
    for table in (ShardSpec.source_index, ShardSpec.gathered_index):
        first, again = table(one, 2), table(two, 2)
        assert first.data_ptr() == again.data_ptr()


def test_text() -> None:
    assert str(ShardSpec(())) == "scalar replicated"
    assert str(ShardSpec((3, 2))) == "3x2 replicated"
    assert str(ShardSpec.strided((6, 2), 0, 3)) == "6x2 sharded on dim 0 in 3 blocks"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ShardSpec((2, 3), 2), r"cannot cut dim 2 of a tensor of shape \(2, 3\)"),
        (lambda: ShardSpec((2, 3), -1), r"cannot cut dim -1"),
        (lambda: ShardSpec((4,), 0, (Block(3),)), r"do not add up to dim 0 of \(4,\)"),
        (lambda: ShardSpec((4,), 0, (Block(4, 3),)), r"Block\(size=4, unit=3.*\) is not a whole number of units"),
        (lambda: ShardSpec.strided((4,), 0, 3), "stride 3 does not divide size 4"),
        (lambda: ShardSpec.strided((4,), 0, 0), "stride 0 does not divide"),
        (lambda: ShardSpec((6,), 0, (Block(6, 2, True),)).local_shape(4), "cannot replicate 3 units over 4 ranks"),
        (lambda: ShardSpec((4,), 0).unshard([torch.zeros(2), torch.zeros(3)]), r"has shape \(3,\), not \(2,\)"),
    ],
)
def test_impossible_cuts_say_why(make: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()  # type: ignore[operator]
