"""``tpcore verify train.py``: every class of silent mistakes is named where it is, and right trainings are equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.silent_bugs import BUGS, Bug, train
from torch import nn

from tpcore import Mesh
from tpcore.runtime.elementwise import tried
from tpcore.testing import run_ranks
from tpcore_explain.verify.script.first import first_difference
from tpcore_explain.verify.script.record import ScriptRecorder, Trace
from tpcore_explain.verify.script.run import ScriptMode
from tpcore_explain.verify.script.verdict import ScriptVerdict


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def traces(
    name: str,
    axes: dict[str, int],
    noise: bool = False,
    right: bool = False,
    most: int | None = None,
    **options: object,
) -> list[Trace]:
    double = torch.get_default_dtype() == torch.float64

    def one(ctx: object) -> Trace:
        recorder = ScriptRecorder(2, noise=noise, double=double)
        with recorder, ScriptMode(recorder, double and "type" not in name):
            train(name, axes.get("tp", 1), right=right, **options)
        return recorder.trace

    return run_ranks(Mesh({"pp": 1, "dp": 1, "cp": 1, "tp": 1} | axes), one, reproducible=most)


def verdict(name: str, axes: dict[str, int], right: bool = False) -> ScriptVerdict:
    (alone,) = traces(name, {})
    return first_difference(alone, traces(name, axes, right=right))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "bug"), BUGS.items(), ids=list(BUGS))
def test_a_mistake_is_named(name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", "off")  # which refuses other batches before anything differs
    found = verdict(name, bug.axes).first
    assert found is not None
    assert (found.module, found.direction) == (bug.module, bug.direction), found
    assert found.cause.startswith(bug.cause)


def test_an_optimizer_that_is_tried_inside_of_a_step_hides_no_gradient() -> None:
    """As tpcore asks those of a job on processes, before their first step of parts."""
    recorder, net = ScriptRecorder(), nn.Linear(2, 2)
    with recorder:
        optimizer = torch.optim.SGD(net.parameters())
        optimizer.register_step_pre_hook(lambda *_: tried(torch.optim.SGD, {}) and None)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert not recorder.trace.delegated


MESHES = ({"tp": 2}, {"dp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}, {"cp": 2, "tp": 2})
RIGHT = [("", axes) for axes in MESHES] + [
    ("sp:", {"tp": 2}),
    ("sp:", {"dp": 2, "tp": 2}),
    ("recomputed", {"tp": 2}),
    ("zero:", {"dp": 2}),
    ("zero:", {"dp": 2, "tp": 2}),
    ("zero: head", {"dp": 2}),
    ("pp:", {"pp": 2}),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "axes"), RIGHT)
def test_right_trainings_are_equal(name: str, axes: dict[str, int]) -> None:
    found = verdict(name, axes, right=True)
    assert found.first is None, found.first
    assert found.compared > 200


@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_as_many_microbatches_on_all_ranks_together_are_one_batch(axes: dict[str, int]) -> None:
    """Bit for bit, where the job is for that."""
    own = {"right": True, "most": 2, "microbatches": 4}
    (alone,) = traces("", {}, **own)
    found = first_difference(alone, traces("", axes, **own))
    assert found.bits
    assert found.first is None, found.first
    assert found.compared > 500


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("name", "axes"), [RIGHT[0], RIGHT[3], RIGHT[5], RIGHT[7]])
def test_rounding_to_bfloat16_is_no_difference(name: str, axes: dict[str, int], seed: int) -> None:
    own = {"right": True, "dtype": torch.bfloat16, "seed": seed}
    (alone,), (noisy,) = traces(name, {}, **own), traces(name, {}, True, **own)
    found = first_difference(alone, traces(name, axes, **own), noisy).first
    assert found is None, found


def test_sums_in_another_order_are_named_where_bits_are_asked_for() -> None:
    (alone,), ranks = traces("", {}), traces("", {"tp": 2}, right=True)
    found = first_difference(alone, ranks, bits=True).first
    assert found is not None
    assert found.direction == "forward"  # in which module, the kernels of the machine decide
    assert found.cause.startswith("sums in another order"), found


@pytest.mark.parametrize(
    "name",
    [
        "row: sum left out",
        "norm of gradients of a part",
        "gradient of one rank is missing",
        "zero: parameter not updated",
    ],
)
def test_where_bits_are_asked_for_causes_allow_for_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that add up, and gradients that one factor scales, do so but for the last bits."""
    monkeypatch.setenv("TPCORE_CHECK", "off")
    (alone,), ranks = traces(name, {}, most=8), traces(name, {"tp": 2}, most=8)
    found, bug = first_difference(alone, ranks).first, BUGS[name]
    assert found is not None
    assert (found.module, found.direction) == (bug.module, bug.direction), found
    assert found.cause.startswith(bug.cause), found
