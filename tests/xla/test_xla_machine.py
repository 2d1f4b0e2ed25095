"""What a Neuron machine takes, asked through ``init``: replicas that are told they are one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

import tpcore
from tpcore_neuron.testing import close, run_replicas


def become(kind: str | None) -> None:
    """As if torch_neuronx were here and named this kind of host. All ranks, which are one process, say the same, and
    none takes it back: others may still be asking."""
    if kind is None:
        for name in ("torch_neuronx", "torch_neuronx.utils"):
            sys.modules.pop(name, None)
        return
    package, utils = ModuleType("torch_neuronx"), ModuleType("torch_neuronx.utils")
    package.__spec__ = ModuleSpec("torch_neuronx", None)
    vars(utils)["get_platform_target"] = lambda: kind
    sys.modules |= {"torch_neuronx": package, "torch_neuronx.utils": utils}


@pytest.fixture(scope="module", autouse=True)
def _replicas_of_these_tests() -> Iterator[None]:
    """Those that were told to be a machine end with the last of them."""
    yield
    close()


def starts(tp: int, kind: str | None) -> dict[str, int]:
    become(kind)
    ctx = tpcore.init(backend="neuron", tp=tp)
    tpcore.shutdown()
    return dict(ctx.mesh.axes)


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(tpcore.BackendError, match=r"4 processes .* shows 2 NeuronCores.*start 2, or make more"):
        run_replicas(starts, 4, 2, None, env={"NEURON_RT_VISIBLE_CORES": "4-5"})
    assert run_replicas(starts, 4, 2, None, env={"NEURON_RT_VISIBLE_CORES": "4-7"})[0]["tp"] == 2


@pytest.mark.parametrize(
    ("tp", "said"), [(4, r"tp=4 on Trn1: .* 1, 2, 8, 16 or a multiple of 32"), (2, None), (8, None)]
)
def test_tp_on_trn1(tp, said):
    eight = {"NEURON_RT_VISIBLE_CORES": "0-7"}
    if said is None:
        assert run_replicas(starts, 8, tp, "trn1", env=eight)[0] == {"pp": 1, "dp": 8 // tp, "tp": tp}
    else:
        with pytest.raises(tpcore.BackendError, match=said):
            run_replicas(starts, 8, tp, "trn1", env=eight)


def test_a_number_of_ranks_that_a_trn1_host_does_not_take():
    with pytest.raises(tpcore.BackendError, match="4 processes on a Trn1 host: collectives there take 1, 2"):
        run_replicas(starts, 4, 2, "trn1", env={"NEURON_RT_VISIBLE_CORES": "0-31"})


def doubles(kind: str | None) -> torch.dtype:
    os.environ["NEURON_RT_VISIBLE_CORES"] = "0-1"
    become(kind)
    tpcore.init(backend="neuron", tp=2)
    try:
        return tpcore.RowParallelLinear(4, 2, dtype=torch.float64).weight.dtype
    finally:
        tpcore.shutdown()


def test_float64_is_refused_where_it_would_be_float32():
    with pytest.raises(ValueError, match=r"weight of torch.float64: this backend computes on torch.float32"):
        run_replicas(doubles, 2, "inf2")
    assert run_replicas(doubles, 2, None) == [torch.float64] * 2
