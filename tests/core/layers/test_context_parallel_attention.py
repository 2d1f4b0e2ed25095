"""Attention over dealt tokens: output and gradients are those of torch's attention over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import each_rank
from torch import Tensor

import tpcore
from tpcore import Mesh
from tpcore.comm.transport import Pending
from tpcore.layers import ContextParallelAttention, context_parallel, ring
from tpcore.layers.ring import put, take
from tpcore.layers.tokens import TokenOrder, Visible
from tpcore.layout.mesh import Group
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadTransport

TOKENS, EXACT = 24, 1e-12  # float64, in which the order of sums is all that differs
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "all": {"causal": False},
    "window": {"causal": True, "window": 7},
    "both sides": {"causal": False, "window": 5},
    "documents": {"causal": True, "segments": True},
    "documents, all": {"causal": False, "segments": True},
    # the first queries of the first row see no key: torch gives them zeros, and no gradient
    "padding": {"causal": True, "keys": True},
}


def inputs(kv: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made, heads = torch.Generator().manual_seed(0), 6 if kv == 3 else 4
    q, k, v = (torch.randn(2, h, TOKENS, 6, dtype=torch.float64, generator=made) for h in (heads, kv, kv))
    segments = torch.zeros(2, TOKENS, dtype=torch.int64)
    segments[0, 5:], segments[0, 18:], segments[1, 11:] = 1, 2, 1
    return q, k, v, segments


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    segments: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """By definition, key by key."""
    at = torch.arange(TOKENS)
    seen = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool)
    if causal:
        seen &= at[:, None] >= at
    if window is not None:
        seen &= (at[:, None] - at).abs() < window
    if segments is not None and segments.dtype == torch.bool:
        seen &= segments[:, None, None]
    elif segments is not None:
        seen &= (segments[:, :, None] == segments[:, None, :])[:, None]
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(2, -1, TOKENS, 1)], -1).softmax(-1)
    return weights[..., :-1] @ v


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("kv", [4, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
def test_equals_attention_over_the_whole_sequence(
    way: str, mask: str, kv: int, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "ROWS", 5)  # several runs of queries in a block, the last one shorter
    equal_to_the_whole(way, mask, kv, cp)


@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
def test_key_heads_that_ranks_do_not_divide(way: str) -> None:
    equal_to_the_whole(way, "causal", 3, 2)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["gather", "ulysses"])
def test_a_large_mask_is_taken_in_runs(way: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "LARGEST_MASK", 20 * TOKENS)  # runs of 5 queries; of 2 where rows differ
    equal_to_the_whole(way, mask, 1, 2)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_runs_have_the_autocast_of_forward(
    softcap: float | None, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softcapped scores, and the dtypes of autocast, are those of attention with the mask in one piece."""

    def rank(ctx: tpcore.ParallelContext) -> list[Tensor]:
        layer = ContextParallelAttention("gather", scale=0.3, softcap=softcap)
        mine = [layer.order.cut(t.float(), 2).requires_grad_() for t in inputs(1)[:3]]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            out = layer(*mine)
        out.float().square().sum().backward()
        assert out.dtype == (dtype or torch.float32)
        return [out, *(cast(Tensor, t.grad) for t in mine)]

    want = run_ranks(Mesh({"dp": 1, "cp": 2}), rank)
    monkeypatch.setattr(context_parallel, "LARGEST_MASK", 20 * TOKENS)
    limit = 1e-5 if dtype is None else 2**-6  # sums in another order; bfloat16 rounds each run's gradients
    for got, expected in zip(run_ranks(Mesh({"dp": 1, "cp": 2}), rank), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
def test_sinks_take_their_share_of_the_softmax(way: str, mask: str, cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's score without a value, as in GPT-OSS; with few queries in a run of a mask, and in one of the ring."""
    equal_to_the_whole(way, mask, 2, cp, sinks=True)
    monkeypatch.setattr(context_parallel, "LARGEST_MASK", 20 * TOKENS)
    monkeypatch.setattr(ring, "ROWS", 5)
    equal_to_the_whole(way, mask, 1, cp, sinks=True)


@each_rank(dp=1, cp=2)
def test_sinks_that_do_not_fit_are_refused(ctx: tpcore.ParallelContext) -> None:
    q, k, v, _ = inputs(4)
    for way in ("gather", "ulysses", "ring"):
        with pytest.raises(ValueError, match=r"sinks of shape \(1,\) beside 4 heads: pass one for each head"):
            ContextParallelAttention(way)(q, k, v, sinks=torch.zeros(1))
    with pytest.raises(RuntimeError):  # a query of other features has no sink for that
        ContextParallelAttention()(F.pad(q, (0, 8)), k, v)
    with pytest.raises(ValueError, match=r"sinks and softcap=2.0: whether the cap holds for sinks"):
        ContextParallelAttention(softcap=2.0)(q, k, v, sinks=torch.zeros(4))


def equal_to_the_whole(way: str, mask: str, kv: int, cp: int, sinks: bool = False) -> None:
    options = {"window": None, "segments": False, "keys": False} | MASKS[mask]
    *qkv, segments = inputs(kv)
    segments = segments if options.pop("segments") else None
    if options.pop("keys"):
        segments = torch.ones(2, TOKENS, dtype=torch.bool)
        segments[0, :9], segments[1, -5:] = False, False
    leaves = [t.requires_grad_() for t in qkv]
    extra = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]).double().requires_grad_()} if sinks else {}
    want = whole(*leaves, segments=segments, **options, **extra)
    assert mask != "padding" or not want[0, :, :9].any()
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((want * weight).sum(), [*leaves, *extra.values()])

    def rank(ctx: tpcore.ParallelContext) -> None:
        layer = ContextParallelAttention(way, scale=0.3, **options)
        mine = [layer.order.cut(t.detach(), 2).requires_grad_() for t in qkv]
        own = {name: t.detach().clone().requires_grad_() for name, t in extra.items()}
        out = layer(*mine, segments, **own)
        (out * layer.order.cut(weight, 2)).sum().backward()
        torch.testing.assert_close(layer.order.whole(out, 2), want, rtol=EXACT, atol=EXACT)
        for t, expected in zip(mine, gradients[:3], strict=True):
            torch.testing.assert_close(t.grad, layer.order.cut(expected, 2), rtol=EXACT, atol=EXACT)
        for t, expected in zip(own.values(), gradients[3:], strict=True):  # of each rank's own queries
            torch.testing.assert_close(ctx.comm("cp").all_reduce(t.grad), expected, rtol=EXACT, atol=EXACT)

    run_ranks(Mesh({"dp": 1, "cp": cp}), rank)


@each_rank(dp=1, tp=2)
def test_a_mesh_without_the_axis_is_one_rank(ctx: tpcore.ParallelContext) -> None:
    q, k, v, _ = inputs(1)
    got = ContextParallelAttention("ring", scale=0.3)(q, k, v)
    torch.testing.assert_close(got, whole(q, k, v, True, None, None), rtol=EXACT, atol=EXACT)


@each_rank(dp=1, cp=2)
def test_in_bfloat16_sums_are_in_float32(ctx: tpcore.ParallelContext) -> None:
    q, k, v, _ = inputs(1)
    layer = ContextParallelAttention("ring", scale=0.3)
    got = layer(*(layer.order.cut(t, 2).bfloat16() for t in (q, k, v)))
    assert got.dtype == torch.bfloat16
    want = whole(*(t.bfloat16().double() for t in (q, k, v)), True, None, None)
    # one rounding of the result: half of 2^-8 of values up to 4
    torch.testing.assert_close(layer.order.whole(got, 2).double(), want, rtol=2**-8, atol=2**-9)


def _across(x: Tensor) -> Tensor:
    """Equal, with the elements of dim 2 side by side in memory."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("width", [6, 4])
@pytest.mark.parametrize("mask", ["causal", "all", "window"])
@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
@each_rank(cp=2)
def test_of_any_strides_and_values_of_another_width(
    ctx: tpcore.ParallelContext, way: str, mask: str, width: int
) -> None:
    options = {"window": None} | MASKS[mask]
    q, k, v, _ = inputs(2)
    leaves = [t.detach().requires_grad_() for t in (q, k, v[..., :width])]
    want = whole(*leaves, **options, segments=None)
    gradients = torch.autograd.grad(want.sum(), leaves)
    layer = ContextParallelAttention(way, scale=0.3, **options)
    mine = [_across(layer.order.cut(t.detach(), 2)).requires_grad_() for t in leaves]
    out = layer(*mine)
    torch.testing.assert_close(out, layer.order.cut(want, 2), rtol=EXACT, atol=EXACT)
    for gradient in (torch.ones_like(out[:1, :1, :1, :1]).expand_as(out), _across(torch.ones_like(out))):
        got = torch.autograd.grad(out, mine, gradient, retain_graph=True)
        for t, expected in zip(got, gradients, strict=True):
            torch.testing.assert_close(t, layer.order.cut(expected, 2), rtol=EXACT, atol=EXACT)


@each_rank(cp=2)
def test_second_derivatives_are_right_or_refused(ctx: tpcore.ParallelContext) -> None:
    """With capped scores, which torch computes by operations that have them."""

    def twice(attend: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), leaves)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = ((q @ k.mT * 0.3) / 2).tanh() * 2
        return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).softmax(-1) @ v

    leaves = [t.requires_grad_() for t in inputs(4)[:3]]
    want = twice(plain, leaves)
    for way in ("gather", "ulysses", "ring"):
        layer = ContextParallelAttention(way, scale=0.3, softcap=2.0)
        mine = [layer.order.cut(t.detach(), 2).requires_grad_() for t in leaves]
        if way == "ring":
            first = torch.autograd.grad(layer(*mine).square().sum(), mine, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiate twice"):
                sum(t.square().sum() for t in first).backward()
            continue
        for got, expected in zip(twice(layer, mine), want, strict=True):
            torch.testing.assert_close(got, layer.order.cut(expected, 2), rtol=EXACT, atol=EXACT)


class NotesPermutes(ThreadTransport):
    """Notes when a permute is started, and when its result is waited for."""

    notes: ClassVar[dict[int, str]] = {}

    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        self.notes[self.index] += "s"
        wait = super().start_permute(x, to)

        def noted() -> Tensor:
            self.notes[self.index] += "w"
            return wait()

        return noted


class Noting(ThreadBackend):
    transport_class = NotesPermutes

    def connect(self, group: Group, rank: int) -> NotesPermutes:
        return NotesPermutes(group, rank, self._world)


def test_blocks_travel_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    cp = 3

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            NotesPermutes.notes[tpcore.current().rank] += "c"
            return function(*arguments, **options)

        return noted

    for name in ("_kernel", "_kernel_gradients"):
        monkeypatch.setattr(ring, name, noting(getattr(ring, name)))
    monkeypatch.setattr(NotesPermutes, "notes", dict.fromkeys(range(cp), ""))
    q, k, v, _ = (t.requires_grad_(t.is_floating_point()) for t in inputs(4))
    want = whole(q, k, v, True, None, None)
    gradients = torch.autograd.grad(want.sum(), (q, k, v))

    def rank(ctx: tpcore.ParallelContext) -> None:
        layer = ContextParallelAttention("ring", scale=0.3)
        mine = [layer.order.cut(t.detach(), 2).requires_grad_() for t in (q, k, v)]
        out = layer(*mine)
        torch.testing.assert_close(out, layer.order.cut(want, 2), rtol=EXACT, atol=EXACT)
        # keys with values start, the block they came with is computed (zig-zag: two halves), then they are here
        assert NotesPermutes.notes[ctx.rank] == "scwsccwcc"
        NotesPermutes.notes[ctx.rank] = ""
        out.sum().backward()
        # gradients start when they are computed, and are waited for after the next block
        assert NotesPermutes.notes[ctx.rank] == "scswsccwswccwsw"
        for t, expected in zip(mine, gradients, strict=True):
            torch.testing.assert_close(t.grad, layer.order.cut(expected, 2), rtol=EXACT, atol=EXACT)

    run_ranks(Mesh({"cp": cp}), rank, backend=Noting)


def test_zig_zag_deals_equal_work() -> None:
    def rank(ctx: tpcore.ParallelContext) -> int:
        order = TokenOrder(ctx.comm("cp"), zigzag=True)
        mask = Visible(True).mask(order.places(TOKENS), torch.arange(TOKENS))
        assert mask is not None
        return int(mask.sum())

    assert len(set(run_ranks(Mesh({"cp": 3}), rank))) == 1


@pytest.mark.parametrize(
    ("half", "signs"),
    [(0, "--++"), (1, "++--"), (None, "----"), (torch.tensor([True]), "--++"), (torch.tensor([False]), "++--")],
)
def test_a_half_is_put_where_it_was_taken(half: Any, signs: str) -> None:
    x = torch.arange(8.0).view(2, 4)
    want = x * torch.tensor([float(f"{sign}1") for sign in signs])
    assert torch.equal(put(x, half, 1, -take(x, half, 1)), want)


@each_rank(cp=3)
def test_what_does_not_fit(ctx: tpcore.ParallelContext) -> None:
    with pytest.raises(ValueError, match="not 'rings'"):
        ContextParallelAttention("rings")
    with pytest.raises(ValueError, match="window must be 1 token or more, not 0"):
        ContextParallelAttention(window=0)
    layer = ContextParallelAttention("ulysses")
    q, k, v, _ = (layer.order.cut(t, min(2, t.ndim - 1)) for t in inputs(1))
    with pytest.raises(ValueError, match="4 heads fit cp=1, 2, 4 only"):
        layer(q, k, v)
    with pytest.raises(ValueError, match="cannot deal 25 tokens evenly: pad the batch to a multiple of 3, 27"):
        layer.order.cut(torch.zeros(1, 25))
