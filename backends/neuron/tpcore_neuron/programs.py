"""Traced programs: one HLO module for all ranks, whose parameters are weights, ranks and inputs. The written module
is the compiler's input, the same on a CPU and on Neuron. On a machine with the Neuron tools ``torch_neuronx.trace``
compiles it too, and the compiled program is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context as exporting

from tpcore.backend.interface import CompilerOptions, Function, LoadedProgram, traced
from tpcore.checkpoint.storage.files import write_file
from tpcore.comm.comm import Comm
from tpcore.errors import BackendError
from tpcore.runtime.consensus import check_one_program, together
from tpcore.runtime.context import ParallelContext

from . import platform, reads

HLO, TEXT, PARAMETERS, CONSTANTS = "program.hlo", "program.mlir", "parameters.json", "constants.safetensors"
COMPILED = "neuron.pt"
_XLA: Any = torch_xla._XLAC


class _PureModule(nn.Module):
    """``fn`` as a module for torch_neuronx: weights are parameters, ranks and inputs are arguments."""

    def __init__(self, fn: Function, weights: Mapping[str, Tensor], comms: Sequence[Comm]) -> None:
        super().__init__()
        self._of = fn, sorted(weights), comms  # a tuple, so that nn.Module registers nothing of it
        for key, name in platform.module_keys(weights).items():
            self.register_parameter(key, nn.Parameter(weights[name], requires_grad=False))

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        fn, names, comms = self._of
        ranks, inputs = arguments[: len(comms)], arguments[len(comms) :]
        # sets torch.compiler.is_exporting(), for which torch has no public way: models check it before they
        # read a value, as transformers does for a mask without padding
        with exporting(), traced(comms, ranks):
            return tuple(fn(dict(zip(names, self.parameters(), strict=True)), inputs))


def trace(
    fn: Function,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    ctx: ParallelContext,
    folder: Path,
    compiler: CompilerOptions,
) -> None:
    comms = ctx.comms
    with together(ctx):
        hlo, text, recipe, constants = _lowered(fn, weights, inputs, comms)
    check_one_program(recipe + text, constants, ctx.world)
    with together(ctx):
        if ctx.rank == 0:
            write_file(str(folder / HLO), [hlo])
            write_file(str(folder / TEXT), [text])
            write_file(str(folder / PARAMETERS), [recipe])
            write_file(str(folder / CONSTANTS), [constants])
            if platform.target() is not None:
                zeros = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in weights.items()}
                examples = (*(c.position.cpu() for c in comms), *(t.cpu() for t in inputs))
                module = _PureModule(fn, zeros, comms)
                platform.compile_module(module, examples, folder / COMPILED, compiler)


def _lowered(
    fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], comms: Sequence[Comm]
) -> tuple[bytes, bytes, bytes, bytes]:
    """The program as HLO and as text; its parameters' sources, as JSON; and the constant ones, as safetensors."""
    # placeholders have no values, so no value can get into the program or decide a branch
    placeholders = {name: _placeholder(t) for name, t in weights.items()}
    ranks, arguments = [_placeholder(c.position) for c in comms], [_placeholder(t) for t in inputs]
    with torch.no_grad(), reads.refused():
        outputs = list(_PureModule(fn, placeholders, comms)(*ranks, *arguments))
        context = _XLA.lowering.LoweringContext("tpcore")
        context.build(outputs)
        hlo, text = context.hlo(), _XLA._get_stablehlo(outputs, str(outputs[0].device), [], False)
    sources: list[tuple[list[Any], Tensor]] = [(["weight", name], t) for name, t in placeholders.items()]
    sources += [(["rank", i], t) for i, t in enumerate(ranks)]
    sources += [(["input", i], t) for i, t in enumerate(arguments)]
    known = {context.tensor_parameter_id(t): source for source, t in sources}  # -1: no output depends on it
    parameters: dict[int, Tensor] = context.device_parameter_id_tensor_mapping()
    # torch_xla makes Python numbers other than 0 and 1 parameters too, to avoid recompilation
    constants = {str(at): t.cpu() for at, t in parameters.items() if at not in known}
    recipe = [known.get(at, ["constant", str(at)]) for at in range(len(parameters))]
    written = json.dumps({"groups": [c.name for c in comms], "parameters": recipe}, separators=(",", ":")).encode()
    return hlo, text, written, save({name: t.contiguous() for name, t in constants.items()})


def _placeholder(t: Tensor) -> Tensor:
    placeholder: Tensor = xb.create_placeholder_tensor(t.shape, t.dtype)
    return placeholder


def load(folder: Path, weights: Mapping[str, Tensor], comm_of: Callable[[str], Comm]) -> LoadedProgram:
    """Load the program in ``folder``. ``comm_of``: returns the Comm of a group by its name."""
    try:
        recipe = json.loads((folder / PARAMETERS).read_text())
        ranks = [comm_of(axes).position for axes in recipe["groups"]]
        if (folder / COMPILED).is_file() and platform.target() is not None:
            return platform.load_compiled(folder / COMPILED, weights, [t.cpu() for t in ranks])
        constants = load_file(folder / CONSTANTS)
        computation = xb.computation_from_module_proto("tpcore", (folder / HLO).read_bytes())
        device, fixed = torch_xla.device(), {}
        of_weights, free = [], []
        for at, (kind, key) in enumerate(recipe["parameters"]):
            if kind == "input":
                free.append((at, int(key)))
            elif kind == "weight":
                of_weights.append((at, weights[key]))
            else:
                fixed[at] = ranks[key] if kind == "rank" else constants[key].to(device)
    except BackendError:
        raise
    except Exception as e:  # a damaged file can raise any error
        raise BackendError(f"{folder / HLO} is damaged: {type(e).__name__}: {str(e)[:200]}") from e

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        arguments = dict(of_weights) | fixed | {at: inputs[i] for at, i in free}
        outputs: list[Tensor] = _XLA._xla_user_computation(
            "tpcore::program", [arguments[at] for at in range(len(arguments))], computation
        )
        torch_xla.sync()
        return outputs

    return call
