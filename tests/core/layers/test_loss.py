"""Cross entropy over a cut vocabulary: what the matrix does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import Peak, by_call, each_rank
from torch import Tensor

import tpcore
from tpcore.layers import loss
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

Ranks = Callable[..., list[Any]]


def mine(logits: Tensor, ctx: ParallelContext) -> Tensor:
    return logits.chunk(ctx.comm("tp").size, -1)[ctx.coord("tp")].clone().requires_grad_()


@pytest.mark.parametrize("chunk", [1, 30, 1 << 18])  # of 6 logits: 21 runs of a token, 4 of 5 and a rest, 1
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_working_in_chunks_changes_no_bit(chunk: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 7, 12), torch.randint(11, (3, 7))
    target[0, :2] = -100

    def rank(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        return _loss_and_grad(ctx, logits, target, label_smoothing=smoothing, vocab_size=11)

    want = run_ranks(Mesh({"tp": 2}), rank)
    monkeypatch.setattr(loss, "CHUNK", chunk)
    for got, expected in zip(run_ranks(Mesh({"tp": 2}), rank), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("magnitude", [1e3, 1e30])
def test_large_logits_stay_finite(ranks: Ranks, magnitude: float) -> None:
    logits = torch.tensor([[-1.0, 1.0, 0.5, -0.5], [1.0, 1.0, 1.0, 1.0]]) * magnitude
    target = torch.tensor([1, 3])
    for out, grad in ranks(Mesh({"dp": 1, "tp": 2}), _loss_and_grad, logits, target):
        # the target is far ahead, and level with three others
        assert out.tolist() == [0.0, pytest.approx(torch.tensor(4.0).log().item(), abs=1e-6 * magnitude)]
        assert out.isfinite().all()
        assert grad.isfinite().all()


def _loss_and_grad(ctx: ParallelContext, logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    part = mine(logits, ctx)
    out = tpcore.parallel_cross_entropy(part, target, **options)
    out.sum().backward()
    assert part.grad is not None
    return out.detach(), part.grad


@pytest.mark.parametrize("masked", [float("-inf"), torch.finfo(torch.float32).min])
@each_rank(dp=1, tp=2)
def test_masked_logits(ctx: ParallelContext, masked: float) -> None:
    """Words that cannot be said, among them all words of one rank."""
    torch.manual_seed(0)
    logits = torch.randn(4, 8)
    logits[1:, 4:] = masked  # of all tokens but one
    logits[0, 2] = masked
    target = torch.tensor([0, 1, 2, 3])
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole, target, reduction="none")
    want.sum().backward()
    assert whole.grad is not None
    out, grad = _loss_and_grad(ctx, logits, target)
    torch.testing.assert_close(out, want.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, whole.grad.chunk(2, -1)[ctx.coord("tp")], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ignored", [-100, 8])  # and the id that comes after the last
@each_rank(dp=1, tp=2)
def test_ignored_tokens_take_no_gradient_even_from_a_mean_of_nothing(ctx: ParallelContext, ignored: int) -> None:
    """sum / 0 sends inf back; 0 * inf would be nan."""
    target = torch.full((3,), ignored)
    part = mine(torch.randn(3, 8), ctx)
    out = tpcore.parallel_cross_entropy(part, target, ignore_index=ignored)
    (out.sum() / (target != ignored).sum()).backward()
    assert part.grad is not None
    assert not part.grad.any()


@each_rank(dp=1, tp=2)
def test_no_tokens(ctx: ParallelContext) -> None:
    part = torch.zeros(0, 4, requires_grad=True)
    out = tpcore.parallel_cross_entropy(part, torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0,)
    out.sum().backward()
    assert part.grad is not None
    assert part.grad.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@each_rank(dp=1, tp=2)
def test_backward_again_through_a_retained_graph(ctx: ParallelContext, smoothing: float, dtype: torch.dtype) -> None:
    """With another gradient, and without touching the one given before."""
    torch.manual_seed(0)
    logits, target = torch.randn(5, 8).to(dtype), torch.randint(7, (5,))
    part = mine(logits, ctx)
    out = tpcore.parallel_cross_entropy(part, target, smoothing, vocab_size=7)
    (once,) = torch.autograd.grad(out.sum(), part, retain_graph=True)
    kept = once.clone()
    (again,) = torch.autograd.grad(2 * out.sum(), part, retain_graph=True)
    (third,) = torch.autograd.grad(out.sum(), part)
    assert torch.equal(once, kept)
    torch.testing.assert_close(third, once, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(again, 2 * third)


@each_rank(dp=2, tp=2)
def test_over_a_group_of_ones_own(ctx: ParallelContext) -> None:
    """The vocabulary cut over dp, by a Comm and by the group object that a user's script holds."""
    torch.manual_seed(0)
    logits, target = torch.randn(4, 8), torch.randint(8, (4,))
    want, dp = F.cross_entropy(logits, target, reduction="none"), ctx.comm("dp")
    for group in (dp, dp.process_group):
        got = tpcore.parallel_cross_entropy(logits.chunk(2, -1)[ctx.coord("dp")], target, group=group)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


INVALID = by_call(r"""
loss(torch.zeros(2, 4), torch.tensor([0, 8]))
    ids from 0 to 8 do not fit a vocabulary of 8 \(ignore_index=-100\)
loss(torch.zeros(2, 4), torch.tensor([0, 7]), vocab_size=7)
    ids from 0 to 7 do not fit a vocabulary of 7
loss(torch.zeros(2, 4), torch.tensor([0, -1]))
    ids from -1 to 0
loss(torch.zeros(2, 3, 4), torch.zeros(3, 2, dtype=torch.int64))
    logits of shape \(2, 3, 4\) need targets of \(2, 3\), not \(3, 2\)
loss(torch.zeros(2, 4), torch.tensor([0, 1]), 1.5)
    label_smoothing must be in \[0, 1\], not 1.5
loss(torch.zeros(2, 4), torch.tensor([0, 1]), vocab_size=9)
    vocab_size=9 does not fit 4 logits on each of 2 ranks
loss(torch.zeros(2, 4), torch.tensor([0, 1]), vocab_size=0)
    vocab_size=0
""")


@pytest.mark.parametrize("call", INVALID)
@each_rank(dp=1, tp=2)
def test_bad_arguments_are_an_error_on_every_rank(ctx: ParallelContext, call: str) -> None:
    error = IndexError if "ids from" in INVALID[call] else ValueError
    with pytest.raises(error, match=INVALID[call]):
        eval(call, {"torch": torch, "loss": tpcore.parallel_cross_entropy})


@pytest.mark.parametrize(("dtype", "smoothing"), [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.1)])
def test_memory_beyond_the_gradient_is_a_few_chunks(
    dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK", 4 * 1024)

    def rank(ctx: ParallelContext) -> None:
        with Peak() as found:  # with the logits: it would count those from outside at the first view of them
            logits, target = torch.ones(256, 1024, dtype=dtype, requires_grad=True), torch.zeros(256, dtype=torch.int64)
            tpcore.parallel_cross_entropy(logits, target, smoothing, vocab_size=1023).sum().backward()
        # the logits, their gradient and chunks in float32: a float32 copy of bfloat16 logits would be 64 chunks more
        assert found.most <= 2 * logits.nbytes + 8 * 4 * loss.CHUNK

    run_ranks(Mesh({"tp": 1}), rank)
