"""``tpcore verify train.py`` on layers that are not tpcore's: no adapter, and each mistake is named where it is."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from helpers.foreign_bugs import BUGS, LIBRARIES, traces

import tpcore
from tpcore_explain.verify.script.first import first_difference
from tpcore_explain.verify.script.verdict import ScriptVerdict

pytestmark = [
    *(pytest.mark.slow, pytest.mark.xdist_group("launched"), pytest.mark.processes),
    pytest.mark.usefixtures("default_checks"),
]
RIGHT = ("", "recomputed", "dp", "sp: norm", "sp: router")
PACKAGES = {"torch": "torch", "megatron.core": "megatron-core", "fairscale": "fairscale"}


def need(library: str) -> None:
    if find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{PACKAGES[library]} is not installed: pip install {PACKAGES[library]}")


@pytest.fixture(scope="module", params=LIBRARIES)
def verdicts(request: pytest.FixtureRequest) -> dict[str, ScriptVerdict]:
    """Of all trainings with a library's layers: by name, those without a mistake by ``right``."""
    need(request.param)
    cases = [(name, 0, None, False, False) for name in BUGS] + [(name, 0, None, True, False) for name in RIGHT]
    (alone,), ranks = (tpcore.launch(traces, n, args=(request.param, cases, True)) for n in (1, 2))
    found = [first_difference(one, list(of_ranks)) for one, *of_ranks in zip(alone, *ranks, strict=True)]
    return dict(zip([*BUGS, *(f"right {name}" for name in RIGHT)], found, strict=True))


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_named(verdicts: dict[str, ScriptVerdict], name: str) -> None:
    first, (module, direction, cause) = verdicts[name].first, BUGS[name]
    assert first is not None
    assert (first.module, first.direction) == (module, direction), first
    hooked = ("hook sees",) if first.kind == "Embedding" else ()  # of torch's, which hooks shard
    assert first.cause.startswith((cause, *hooked)), first


@pytest.mark.parametrize("name", RIGHT)
def test_right_trainings_are_equal(verdicts: dict[str, ScriptVerdict], name: str) -> None:
    found = verdicts[f"right {name}"]
    assert found.first is None, found.first
    assert found.compared > 150
    assert found.parts > 0


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 30), marks=pytest.mark.drill)], ids=["3", "30"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_rounding_to_bfloat16_is_no_difference(library: str, seeds: range) -> None:
    need(library)
    cases = [("", seed, torch.bfloat16, True, noise) for seed in seeds for noise in (False, True)]
    (alone,), ranks = (tpcore.launch(traces, n, args=(library, cases, False)) for n in (1, 2))
    for i in range(0, len(cases), 2):
        found = first_difference(alone[i], [rank[i] for rank in ranks], alone[i + 1]).first
        assert found is None, found
