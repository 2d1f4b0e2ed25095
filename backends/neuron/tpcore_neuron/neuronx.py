"""All of tpcore's calls of torch_neuronx, as its documentation describes them. They import it when called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from tpcore.backend.interface import CompilerOptions, LoadedProgram
from tpcore.errors import BackendError


def platform() -> str | None:
    """``trn1``, ``inf2``, ``trn2``...; None without torch_neuronx."""
    if find_spec("torch_neuronx") is None:
        return None
    from torch_neuronx.utils import get_platform_target

    return str(get_platform_target())


def keys(names: Iterable[str]) -> dict[str, str]:
    """Names under which a module can register weights, and the weights' own names."""
    return {f"w{i}": name for i, name in enumerate(sorted(names))}


def compile_module(module: nn.Module, examples: Sequence[Tensor], path: Path, options: CompilerOptions) -> None:
    """Compile ``module`` for NeuronCores, without its weights, and write it. ``examples``: on the CPU."""
    import torch_neuronx

    given = {"compiler_args": list(options.args)} if options.args else {}
    with TemporaryDirectory(prefix="tpcore-neuronx-") as temporary:
        # a directory for each program: a model with buckets has several
        workdir = Path(temporary) if options.workdir is None else Path(options.workdir, path.parent.name)
        workdir.mkdir(parents=True, exist_ok=True)
        traced = torch_neuronx.trace(
            module, tuple(examples), compiler_workdir=str(workdir), inline_weights_to_neff=False, **given
        )
    torch.jit.save(traced, str(path))


def load_compiled(path: Path, weights: Mapping[str, Tensor], ranks: Sequence[Tensor]) -> LoadedProgram:
    """Load the file of ``compile_module`` onto this process's NeuronCore, with ``weights``."""
    import torch_neuronx

    try:
        module = torch.jit.load(str(path))  # TorchScript contains no Python code
    except RuntimeError as e:
        raise BackendError(f"{path} is damaged: {str(e)[:200]}") from e
    versions: list[int] = []

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        now = [t._version for t in weights.values()]
        if now != versions:  # at the first call, and after a weight has changed in place
            torch_neuronx.replace_weights(module, {k: weights[n].cpu() for k, n in keys(weights).items()})
            versions[:] = now
        return list(module(*ranks, *(t.cpu() for t in inputs)))

    return call
