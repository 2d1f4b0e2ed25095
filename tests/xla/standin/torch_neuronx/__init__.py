"""What tpcore calls of torch_neuronx, with its documented signatures, on XLA:CPU in place of NeuronCores.

Every argument is checked. What ``trace`` returns can be saved and loaded by ``torch.jit``, holds the program
and runs it, as the real one does with a NEFF.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, nn

_LIBRARY = torch.library.Library("neuron_standin", "DEF")
_LIBRARY.define("run(Tensor neff, str layout, Tensor[] given) -> Tensor[]")


def trace(
    func: Any,
    example_inputs: Any,
    *_: Any,
    input_output_aliases: dict = {},  # noqa: B006  as documented
    compiler_workdir: str | None = None,
    compiler_args: Any = None,
    partitioner_config: Any = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> torch.jit.ScriptModule:
    assert isinstance(func, nn.Module)
    assert isinstance(example_inputs, tuple)
    assert all(isinstance(t, Tensor) and t.device.type == "cpu" for t in example_inputs)
    assert not _
    assert input_output_aliases == {}
    assert compiler_workdir is None or Path(compiler_workdir).is_dir()
    assert compiler_args is None or (isinstance(compiler_args, list) and compiler_workdir is not None)
    if compiler_args:
        (Path(compiler_workdir) / "args").write_text(" ".join(compiler_args))
    assert partitioner_config is None
    assert inline_weights_to_neff is False
    assert cpu_backend is False
    assert os.environ["RANK"] == "0", "one program for all ranks is compiled once"
    device = torch_xla.device()
    weights = func.state_dict()
    held = {name: t.to(device) for name, t in weights.items()}
    inputs = [t.to(device) for t in example_inputs]
    with torch.no_grad():
        outputs = torch.func.functional_call(func, held, tuple(inputs))
    context = torch_xla._XLAC.lowering.LoweringContext("neff")
    context.build(list(outputs))
    position = {context.tensor_parameter_id(t): i for i, t in enumerate((*held.values(), *inputs))}
    parameters = context.device_parameter_id_tensor_mapping()
    constants = {f"c{at}": t.cpu() for at, t in parameters.items() if at not in position}
    first = len(held) + len(inputs)
    position |= {int(name[1:]): first + i for i, name in enumerate(constants)}
    return _scripted(context.hlo(), [position[at] for at in range(len(parameters))], weights, len(inputs), constants)


def _scripted(
    hlo: bytes, layout: list[int], weights: Mapping[str, Tensor], inputs: int, constants: Mapping[str, Tensor]
) -> torch.jit.ScriptModule:
    module = nn.Module()
    module.register_buffer("neff", torch.frombuffer(bytearray(hlo), dtype=torch.uint8))
    for name, t in (*weights.items(), *constants.items()):
        module.register_buffer(name, t)
    scripted = torch.jit.script(module)
    names = [f"x{i}" for i in range(inputs)]
    given = [*(f"self.{n}" for n in weights), *names, *(f"self.{n}" for n in constants)]
    scripted.define(
        f"def forward(self, {', '.join(names)}):\n"
        f"    return torch.ops.neuron_standin.run(self.neff, '{json.dumps(layout)}', [{', '.join(given)}])\n"
    )
    return scripted


def _run(neff: Tensor, layout: str, given: list[Tensor]) -> list[Tensor]:
    computation = xb.computation_from_module_proto("neff", bytes(neff.numpy().tobytes()))
    held = [given[i].to(torch_xla.device()) for i in json.loads(layout)]
    found = torch_xla._XLAC._xla_user_computation("neuron::run", held, computation)
    torch_xla.sync()
    return [t.cpu() for t in found]


torch.library.impl("neuron_standin::run", "CompositeExplicitAutograd", lib=_LIBRARY)(_run)


def replace_weights(neuron_model: Any, weights: Any) -> None:
    assert isinstance(neuron_model, torch.jit.RecursiveScriptModule)
    assert isinstance(weights, dict)
    own = {name: t for name, t in neuron_model.named_buffers() if name[0] == "w"}
    assert own.keys() == weights.keys()
    for name, t in weights.items():
        assert (t.device.type, t.shape, t.dtype) == ("cpu", own[name].shape, own[name].dtype)
        own[name].copy_(t)
