"""What losses of one's own read of sharded logits equals torch on the whole: values, first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore.comm import mappings as ops
from tpcore.layers import gather_logits, parallel_entropy, parallel_kl_div, parallel_log_softmax, parallel_logsumexp
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

LABELS = torch.tensor([[1, 5, -100], [10, 0, 7]])


def _divergence(logits: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return -F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="none").view(LABELS.shape)


def _entropy(logits: Tensor) -> Tensor:
    log_share = logits.log_softmax(-1)
    return -(log_share.exp() * log_share.masked_fill(log_share.isneginf(), 0.0)).sum(-1)


# what is computed on ranks of one or both of two logits, on the whole, and which of the two are whole on ranks as well
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "gather_logits": (lambda a, b, **k: gather_logits(a, **k), lambda a, b: a, ()),
    "logsumexp": (lambda a, b, **k: parallel_logsumexp(a, **k), lambda a, b: a.logsumexp(-1), ()),
    "log_softmax": (lambda a, b, **k: parallel_log_softmax(a, LABELS, **k), lambda a, b: _log_softmax(a), ()),
    "entropy": (lambda a, b, **k: parallel_entropy(a, **k), lambda a, b: _entropy(a), ()),
    "kl_div": (parallel_kl_div, _divergence, ()),
    "kl_div, whole teacher": (parallel_kl_div, _divergence, (1,)),
    "kl_div, whole student": (parallel_kl_div, _divergence, (0,)),
    "kl_div, both whole": (parallel_kl_div, _divergence, (0, 1)),
}


def part(whole: Tensor, ctx: ParallelContext, fill: float) -> Tensor:
    """This rank's columns of the whole, of which the last ranks' are padded."""
    n = ctx.comm("tp").size
    return F.pad(whole.detach(), (0, -whole.shape[-1] % n), value=fill).chunk(n, -1)[ctx.coord("tp")].clone()


def gradients(y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of a sum with weights; zeros where ``y`` does not depend on an input."""
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)
    return list(torch.autograd.grad((y * weights).sum(), inputs, create_graph=True, materialize_grads=True))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [12, 11])
def test_equals_the_whole(name: str, tp: int, vocab: int) -> None:
    """The value, its gradient, and the gradient of that gradient's square, to the rounding of float64."""
    sharded, unsharded, kept = FUNCTIONS[name]
    torch.manual_seed(0)
    whole = [torch.randn(2, 3, vocab, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    want = unsharded(*whole)
    once = gradients(want, whole)
    twice = torch.autograd.grad(sum(g.square().sum() for g in once), whole, materialize_grads=True)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)

    def rank(ctx: ParallelContext) -> None:
        mine = [t.detach().clone() if i in kept else part(t, ctx, 1e4) for i, t in enumerate(whole)]
        inputs = [t.requires_grad_() for t in mine]
        y = sharded(*inputs, vocab_size=vocab)
        close(y, want)
        first = gradients(y, inputs)
        squares = [g.square().sum() for g in first]
        total = sum(s if i in kept else ops.reduce(s, ctx.comm("tp")) for i, s in enumerate(squares))
        second = torch.autograd.grad(total, inputs, materialize_grads=True)
        for i in range(2):
            for got, expected in ((first[i], once[i]), (second[i], twice[i])):
                close(got, expected if i in kept else part(expected, ctx, 0.0))

    run_ranks(Mesh({"tp": tp}), rank)


def test_words_that_cannot_be_said_and_halves() -> None:
    """Logits of -inf, all of a rank's among them, give no NaN; bfloat16 is summed in float32."""
    torch.manual_seed(0)
    whole = torch.randn(3, 8)
    whole[:, 4:], whole[0, 1] = -torch.inf, -torch.inf
    teacher = whole * 0.5
    want = {
        n: f(whole.requires_grad_(), teacher) for n, (_, f, _) in FUNCTIONS.items() if n in ("entropy", "logsumexp")
    }

    def rank(ctx: ParallelContext) -> None:
        for name, expected in want.items():
            mine = part(whole, ctx, 0.0).requires_grad_()
            y = FUNCTIONS[name][0](mine, mine)
            torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-6)  # float32 of numbers near 1
            (got,) = torch.autograd.grad(y.sum(), mine)
            (grad,) = torch.autograd.grad(expected.sum(), whole, retain_graph=True)
            torch.testing.assert_close(got, part(grad.nan_to_num(), ctx, 0.0), rtol=0, atol=1e-6)
        mine = part(whole, ctx, 0.0).requires_grad_()
        lowest = mine.detach().clamp(min=torch.finfo(mine.dtype).min).requires_grad_()  # as models mask words
        for name in FUNCTIONS.keys() - {"gather_logits", "log_softmax"}:
            never, least = (torch.autograd.grad(2 * FUNCTIONS[name][0](t, t).sum(), t)[0] for t in (mine, lowest))
            torch.testing.assert_close(least, never, rtol=0, atol=1e-6)
        assert float(parallel_kl_div(mine, mine).detach().abs().max()) == 0.0
        halves = parallel_kl_div(mine.bfloat16(), part(teacher, ctx, 0.0))
        expected = _divergence(whole[:, :4].detach().bfloat16().float(), teacher[:, :4].detach())
        assert halves.dtype == torch.float32
        torch.testing.assert_close(halves[1:], expected[1:], rtol=0, atol=1e-6)  # row 0 has -inf, where torch has NaN

    run_ranks(Mesh({"tp": 2}), rank)


def test_a_padded_head_tells_its_size() -> None:
    head = nn.Linear(6, 11, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64)

    def rank(ctx: ParallelContext) -> None:
        mine = tpcore.ColumnParallelLinear.from_plain(head, gather_output=False, pad=True)
        torch.testing.assert_close(gather_logits(mine(x)), head(x), rtol=0, atol=1e-12)
        torch.testing.assert_close(parallel_kl_div(mine(x), 2 * head(x)), _divergence(head(x), 2 * head(x)))

    run_ranks(Mesh({"tp": 4}), rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (gather_logits, "gather_logits: a layer with pad=True makes 3 features .* pass vocab_size="),
        (lambda t: parallel_logsumexp(t, vocab_size=13), "vocab_size=13 does not fit 3 logits on each of 4 ranks"),
        (lambda t: parallel_entropy(torch.ones(2, 11), vocab_size=11), "these 11 are those of the whole vocabulary"),
        (lambda t: parallel_kl_div(t, torch.ones(3, 3)), r"\(2, 3\) and \(3, 3\) are of other tokens"),
        (lambda t: parallel_kl_div(t, torch.ones(2, 13)), "3 logits are neither the 13 of the other side nor one"),
        (lambda t: parallel_log_softmax(t, torch.tensor([1, 11]), vocab_size=11), "ids from 1 to 11 do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[Tensor], Tensor], message: str) -> None:
    def rank(ctx: ParallelContext) -> None:
        tpcore.ColumnParallelLinear(6, 11, gather_output=False, pad=True)
        with pytest.raises((ValueError, IndexError), match=message):
            call(torch.ones(2, 3))

    run_ranks(Mesh({"tp": 4}), rank)


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda t: tpcore.parallel_cross_entropy(t, LABELS),
    "log_softmax": lambda t: parallel_log_softmax(t, LABELS),
    "logsumexp": parallel_logsumexp,
    "entropy": parallel_entropy,
    "gather_logits": gather_logits,
    "kl_div": lambda t: parallel_kl_div(t, 2 * t),
}


@pytest.mark.parametrize("function", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_logits_are_refused_on_every_rank(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def rank(ctx: ParallelContext) -> None:
        head = tpcore.ColumnParallelLinear(6, 12, gather_output=True, dtype=dtype)
        torch.manual_seed(1)
        logits = head(torch.randn(2, 3, 6, dtype=dtype))
        with pytest.raises(ValueError, match=r"several of 2 ranks have the same 12 .*gather_output=False"):
            function(logits.float())

    run_ranks(Mesh({"tp": 2}), rank)


@pytest.mark.parametrize("function", WHOLE.values(), ids=WHOLE)
def test_parts_that_are_alike_are_not_refused(function: Callable[[Tensor], Tensor]) -> None:
    """Logits of weights that are zero, of a bias alone, without tokens, infinite, and no numbers."""

    def rank(ctx: ParallelContext) -> None:
        for logits in (torch.zeros(2, 3, 6), torch.full((2, 3, 6), torch.nan), torch.full((2, 3, 6), -torch.inf)):
            function(logits)
            function(torch.cat([logits[..., :5], torch.full((2, 3, 1), float(ctx.rank))], -1))
        if function is WHOLE["logsumexp"]:
            function(torch.zeros(0, 6))

    run_ranks(Mesh({"tp": 2}), rank)


@pytest.mark.parametrize("check", ["off", "warmup"])
def test_gathered_logits_are_looked_for_in_the_first_calls_alone(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", check)

    def rank(ctx: ParallelContext) -> int:
        torch.manual_seed(0)
        whole = torch.randn(2, 3, 12)
        if check == "warmup":
            for _ in range(2):
                parallel_logsumexp(whole + ctx.rank)
        parallel_logsumexp(whole)
        return sum(ctx.comm("tp").compared.values())

    assert run_ranks(Mesh({"tp": 2}), rank) == [2 * (check == "warmup")] * 2
