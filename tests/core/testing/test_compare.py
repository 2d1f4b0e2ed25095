"""tpcore.testing.compare tells a right sharded model from wrong ones; the pytest plugin runs such tests."""

from __future__ import annotations

import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore.testing import compare

pytest_plugins = ["pytester"]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*size, dtype=torch.float64) for size in ((4, 6), (6, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Sharded(Plain):
    """The twin of Plain; ``wrong`` is done to this rank's activations."""

    def __init__(self, wrong: Callable[[Tensor], Tensor] = lambda x: x, pad: bool = True) -> None:
        nn.Module.__init__(self)
        self.up = tpcore.ColumnParallelLinear(4, 6, gather_output=False, pad=pad, dtype=torch.float64)
        self.down = tpcore.RowParallelLinear(6, 4, input_is_parallel=True, pad=pad, dtype=torch.float64)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.wrong(torch.tanh(self.up(x))))


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    models = []
    for build in (make, Plain):
        torch.manual_seed(0)
        models.append(build())
    return *models, torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("tp", [1, 2, 4])  # 4 pads
@pytest.mark.parametrize("loss", [None, lambda y: y.square().mean()], ids=["", "loss"])
@each_rank(tp="tp")
def test_a_right_model_is_equal(ctx, tp, loss):
    compare(*both(Sharded), loss=loss)


class WithLoss(dict):
    loss = property(lambda self: self["loss"])


@each_rank(tp=2)
def test_names_dicts_and_outputs_with_a_loss(ctx):
    model, whole, x = both(lambda: renamed("other"))
    for one in (model, whole):
        one.register_forward_hook(lambda _, __, y: WithLoss(loss=y.square().sum(), y=[y]))
    compare(model, whole, {"x": x.detach()}, names={"other.weight": "up.weight", "other.bias": "up.bias"})
    assert x.grad is None
    assert whole.up.weight.grad is not None


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Tensors(tuple[Tensor, ...]):
    """Unknown to pytree, as UserDict is."""


class First(nn.Module):
    """Of the values in the container of its inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Mapping[str, Tensor] | tuple[Tensor, ...]) -> Tensor:
        return self.inner(next(iter(given.values() if isinstance(given, Mapping) else given)))


@pytest.mark.parametrize(
    "container",
    [lambda x: UserDict(x=x), lambda x: Tensors([x]), lambda x: Pair(x, x)],
    ids=["mapping", "tuple", "named tuple"],
)
@each_rank(tp=2)
def test_gradients_of_nested_inputs_are_each_models_own(ctx, container):
    twice = lambda: Sharded(lambda x: 2 * x - x.detach())  # noqa: E731
    for make, finding in ((Sharded, nullcontext()), (twice, pytest.raises(AssertionError, match="2 times the twin's"))):
        model, whole, x = both(make)
        with finding:
            compare(First(model), First(whole), (container(x),))
        assert x.grad is None


def changed_on_rank_1() -> Sharded:
    model = Sharded()
    if tpcore.current().rank == 1:
        with torch.no_grad():
            model.up.weight[0, 2] = 5
    return model


def renamed(name: str) -> Sharded:
    model = Sharded()
    setattr(model, name, model.up)
    del model.up
    model.forward = lambda x: model.down(torch.tanh(getattr(model, name)(x)))
    return model


def frozen() -> Sharded:
    model = Sharded()
    model.up.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        # entry [3, 2] of the whole weight is [0, 2] of rank 1's part
        (changed_on_rank_1, r"the weight of 'up\.weight' differs: at \[3, 2\] it is 5, in the twin -?0\.\d+"),
        (lambda: Sharded(lambda x: x * 2), r"^output differs: at \[0, 0\] it is .*, in the twin"),
        # what a sum over the ranks too many does: values are right, gradients twice too large
        (
            lambda: Sharded(lambda x: 2 * x - x.detach()),
            r"the gradient of input differs: at \[0, 0\] .*, and all of it is 2 times the twin's",
        ),
        (
            lambda: Sharded(lambda x: x.detach() + (x - x.detach()) * 0),
            r"the gradient of input differs.*, and all of it is 0 times the twin's",
        ),
        (
            lambda: renamed("other"),
            r"only the model has \['other\.bias', 'other\.weight'\], only its twin \['up\.bias', 'up\.w",
        ),
        (frozen, r"the gradient of 'up\.bias' differs: only its twin has one"),
    ],
)
@each_rank(tp=2)
def test_a_wrong_model_is_named_on_every_rank(ctx, make, says):
    with pytest.raises((AssertionError, ValueError), match=says):
        compare(*both(make))


TESTS = """
import pytest, tpcore
from tpcore.testing import compare

@pytest.mark.tpcore(tp=[1, 2], dp=2)
def test_ranks(ranks):
    assert ranks(lambda ctx, more: ctx.rank + more, 10) == list(range(10, 10 + 2 * tpcore_size(ranks)))

@pytest.mark.tpcore(tp=2)
def test_a_failing_rank(ranks):
    def rank(ctx):
        assert ctx.rank == 0, "only rank 1 fails"
    ranks(rank)

def test_no_mark(ranks):
    pass

def tpcore_size(ranks):
    return len(ranks(lambda ctx: None)) // 2
"""


def test_the_plugin(pytester):
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "tpcore_pytest", "-p", "no:cacheprovider", "--strict-markers", "-v")
    printed = result.stdout.str()
    for text in (
        "[tp1-dp2] PASSED",
        "[tp2-dp2] PASSED",
        "only rank 1 fails",
        "needs @pytest.mark.tpcore(tp=[1, 2, 4])",
    ):
        assert text in printed
    result.assert_outcomes(passed=2, failed=1, errors=1)


def test_a_mark_without_the_fixture_is_an_error(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.tpcore(tp=2)\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "tpcore_pytest", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*takes the fixture `ranks`*"])
    assert result.ret != 0


def test_the_plugin_imports_no_torch():
    code = "import sys, tpcore_pytest; print(sorted({'torch', 'tpcore', 'numpy'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
