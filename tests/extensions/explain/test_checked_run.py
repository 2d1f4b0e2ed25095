"""A job that is started with ``TPCORE_CHECK=1`` finds each mistake of a model or its data, and names it."""

from __future__ import annotations

import re

import pytest
import torch
from test_mistakes import GIVEN, MISTAKES, OTHER, Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tpcore
from tpcore.runtime.context import ParallelContext

pytestmark = pytest.mark.processes


def _with_part(name: str) -> None:
    part, wrong, _ = MISTAKES[name]
    torch.manual_seed(0)
    model = Model(tokens=part == "norm")
    setattr(model, part, wrong())
    model(*GIVEN).backward()


def _with_other(name: str, ctx: ParallelContext) -> None:
    torch.manual_seed(0)  # the mistake before this one may have been another seed
    OTHER[name][0](ctx)
    tpcore.optimizer_step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def _wrapped() -> None:
    torch.manual_seed(0)
    DistributedDataParallel(Model())


def found(names: list[str]) -> dict[str, str]:
    """What each mistake ends with."""
    said = {}
    for name in names:
        ctx = tpcore.init("cpu_gloo", tp=2)
        try:
            if name in MISTAKES:
                _with_part(name)
            elif name in OTHER:
                _with_other(name, ctx)
            elif name != "none":
                _wrapped()
            said[name] = "no error"
        except ValueError as e:
            said[name] = str(e)
        tpcore.shutdown()
    return said


@pytest.mark.slow
def test_each_is_named_on_every_rank() -> None:
    expected = {name: match for name, (_, _, match) in MISTAKES.items()}
    expected |= {name: match.format(0, 1) for name, (_, match) in OTHER.items()}
    expected |= dict.fromkeys(("batch", "activations", "targets"), "ranks 0 and 1 of one tp group differ in ")
    expected["DistributedDataParallel"] = r"hold different parts of 'embed\.weight'"
    expected["none"] = "^no error$"
    for rank in tpcore.launch(found, 2, args=([*expected],), env={"TPCORE_CHECK": "1"}):
        assert rank.keys() == expected.keys()
        for name, match in expected.items():
            assert re.search(match, rank[name]), (name, rank[name])
    some = ["DistributedDataParallel", next(iter(MISTAKES)), next(iter(OTHER))]
    silent = tpcore.launch(found, 2, args=(some,), env={"TPCORE_CHECK": "warmup"})[0]
    assert [name for name, text in silent.items() if text != "no error"] == some[:1]
