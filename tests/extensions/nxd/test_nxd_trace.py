"""Tracing by NeuronX Distributed's names: options of its compiler, and two names for one argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpcore_nxd import parallel_layers, trace

X = torch.ones(1)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("default_checks")
def test_options_of_a_compiler_that_is_not_here(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tpcore")
    layer = parallel_layers.ColumnParallelLinear
    with trace.parallel_model_trace(
        lambda: layer(8, 4, init_method=torch.nn.init.ones_),
        example_inputs=torch.ones(2, 8),
        tp_degree=2,
        backend="cpu_gloo",
        compiler_args="--model-type=transformer -O1",
        compiler_workdir="work",
        inline_weights_to_neff=True,
        timeout=60,
    ) as model:
        assert model.timeout == 60
        assert model(torch.ones(2, 8)).shape == (2, 4)
    assert capfd.readouterr().err.count("has no compiler, and compiler_args") == 1  # of both ranks' processes
    assert caplog.text.count("inline_weights_to_neff=True") == 1


@pytest.mark.parametrize("given", [{}, {"inputs": X, "example_inputs": X}])
def test_tracing_takes_inputs_by_one_name(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="inputs and example_inputs are two names"):
        trace.parallel_model_trace(torch.nn.Identity, **given, backend="cpu_gloo")


@pytest.mark.parametrize("given", [{}, {"load_dir": "a", "model_dir": "b"}])
def test_loading_takes_one_directory(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="load_dir and model_dir are two names"):
        trace.parallel_model_load(**given)
