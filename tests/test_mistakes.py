"""Mistakes that a model's author can make end in the right result or in an error that names them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.context import ParallelContext
from tpcore.testing import run_ranks


# -- heads that tp does not divide --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: tpcore.ColumnParallelLinear(96, 288, gather_output=False, stride=3, unit=16),
            "output_size=288 in 3 parts, 6 units of 16, is not divisible by tp=4",
        ),
        (
            lambda: tpcore.RowParallelLinear(96, 96, input_is_parallel=True, unit=16),
            "input_size=96, 6 units of 16, is not divisible by tp=4",
        ),
        (
            lambda: tpcore.ColumnParallelLinear(96, 288, stride=3, unit=20),
            "output_size=288 in 3 parts is no whole number of units of 20",
        ),
        (
            lambda: tpcore.ColumnParallelLinear(96, 96, unit=16, blocks=[tpcore.Block(96)]),
            "unit=16 and blocks=.* both say",
        ),
        (
            lambda: tpcore.divide(6, tpcore.current().comm("tp").size, "heads"),
            "heads=6 is not divisible by 4",
        ),
    ],
    ids=["column", "row", "no whole units", "blocks too", "divide"],
)
def test_heads_that_tp_would_cut_are_refused_by_name(build: object, says: str) -> None:
    def check(ctx: ParallelContext) -> None:
        with pytest.raises(ValueError, match=says):
            build()  # type: ignore[operator]

    run_ranks(Mesh({"tp": 4}), check)


def test_units_lie_whole_on_a_rank() -> None:
    plain = nn.Linear(8, 36)  # q|k|v of 4 heads of 3
    x = torch.randn(5, 8)

    def check(ctx: ParallelContext) -> None:
        cut = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=False, stride=3, unit=3)
        heads = plain(x).view(5, 3, 4, 3)[:, :, 2 * ctx.rank : 2 * ctx.rank + 2]
        torch.testing.assert_close(cut(x).view(5, 3, 2, 3), heads)

    run_ranks(Mesh({"tp": 2}), check)


def test_padded_units_are_those_of_the_plain_layers() -> None:
    up, down, x = nn.Linear(8, 18).double(), nn.Linear(18, 8).double(), torch.randn(5, 8).double()

    def check(ctx: ParallelContext) -> None:
        first = tpcore.ColumnParallelLinear.from_plain(up, gather_output=False, unit=3, pad=True)
        second = tpcore.RowParallelLinear.from_plain(down, input_is_parallel=True, unit=3, pad=True)
        torch.testing.assert_close(second(first(x)), down(up(x)))

    run_ranks(Mesh({"tp": 4}), check)


# -- a padded head ------------------------------------------------------------------------------------------
def _head(vocab: int, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, vocab, bias).double(), torch.randn(6, 4).double(), torch.randint(vocab, (6,))


@pytest.mark.parametrize("vocab", [10, 5])  # at tp=4 the last rank of 5 has nothing but padding
def test_the_loss_of_a_padded_head_knows_the_padding(vocab: int) -> None:
    plain, x, target = _head(vocab)
    want = F.cross_entropy(plain(x), target)
    (grad,) = torch.autograd.grad(want, plain.bias)

    def check(ctx: ParallelContext) -> None:
        head = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=False, pad=True)
        loss = tpcore.parallel_cross_entropy(head(x), target).mean()
        torch.testing.assert_close(loss, want)
        loss.backward()
        assert head.bias is not None
        torch.testing.assert_close(
            head.bias.grad, tpcore.shard_specs(head)["bias"].shard(grad, ctx.rank, ctx.mesh.size)
        )

    run_ranks(Mesh({"tp": 4}), check)


def test_padding_that_an_operation_hides_is_refused_unless_the_size_is_given() -> None:
    plain, x, target = _head(10)

    def check(ctx: ParallelContext) -> None:
        head = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=False, pad=True)
        logits = head(x) / 2.0
        with pytest.raises(ValueError, match=r"the last of 12 logits is exactly 0 .* pass vocab_size="):
            tpcore.parallel_cross_entropy(logits, target)
        loss = tpcore.parallel_cross_entropy(logits, target, vocab_size=10).mean()
        torch.testing.assert_close(loss, F.cross_entropy(plain(x) / 2.0, target))

    run_ranks(Mesh({"tp": 4}), check)


def test_zeros_that_are_no_padding_pass() -> None:
    """A head that starts as zero everywhere, and tokens of which some have a zero last."""
    target = torch.zeros(3, dtype=torch.int64)

    def check(ctx: ParallelContext) -> None:
        logits = torch.zeros(3, 4)
        torch.testing.assert_close(tpcore.parallel_cross_entropy(logits, target), torch.full((3,), 8.0).log())
        logits[:, 0], logits[1, -1] = 1.0, 1.0
        tpcore.parallel_cross_entropy(logits, target)

    run_ranks(Mesh({"tp": 2}), check)
