"""This machine's packages and NeuronCores, the sizes of a job that the hardware supports, and all calls of
torch_neuronx, as its documentation describes them. They import it when called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from tpcore.backend.interface import CompilerOptions, LoadedProgram
from tpcore.errors import BackendError
from tpcore.extras import module_spec
from tpcore.layout.mesh import Group
from tpcore.settings import LOCAL_RANK, LOCAL_WORLD_SIZE

from .settings import CACHE, CORES, HOST_CC, LIMITS, LOGICAL

XLA_LINE = "2.9"
"""The version of torch, torch-xla and torch-neuronx: the last for which there is a PyTorch/XLA."""

INSTALL = (
    "Trn1 and Inf2 need torch 2.9, torch-xla 2.9 and torch-neuronx 2.9:\n"
    "    pip install 'tpcore[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com\n"
    "Trn2 and Trn3 need torch 2.14 and the torch-neuronx of that number: tpcore[neuron-native]\n"
)
_DEVICES, _FABRIC = "/dev", "/sys/class/infiniband"
_TRN1_RULE = "collectives there take 1, 2, 8, 16 or a multiple of 32 NeuronCores"
_CORES_PER_DEVICE = {"trn1": 2, "inf2": 2, "trn2": 8, "trn3": 8}
_JOINED = "trn2", "trn3"
"""Where several cores of the chip make one logical core."""


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_native() -> bool:
    """Whether the installed torch-neuronx is the native one (2.13 and later), or its stand-in is asked for. A torch_xla
    beside it decides nothing: other packages of AWS bring one."""
    version = installed("torch-neuronx")
    if LIMITS.is_set or version is None:
        return LIMITS.is_set
    return tuple(int(part) for part in version.split(".")[:2]) >= (2, 13)


def wrong_versions() -> str | None:
    """A message about installed versions that do not work together, or None."""
    versions = {name: installed(name) for name in ("torch", "torch-xla", "torch-neuronx")}
    wrong = [f"{k} {v}" for k, v in versions.items() if v is not None and not f"{v}.".startswith(f"{XLA_LINE}.")]
    have = ", ".join(f"{name} {v or 'missing'}" for name, v in versions.items())
    return f"{' and '.join(wrong)} cannot be used: this environment has {have}. {INSTALL}" if wrong else None


def neuron_devices() -> int:
    return len(list(Path(_DEVICES).glob("neuron[0-9]*")))


def visible_cores(platform: str | None) -> int | None:
    """The number of NeuronCores that this host's processes may use together; None if unknown."""
    cores = CORES.get()
    # under torchrun torch_xla sets it to one core for each process: then it is no number of the host
    if cores and cores != LOCAL_RANK.text():
        spans = (part.partition("-") for part in cores.split(","))
        return sum(int(high or low) - int(low) + 1 for low, _, high in spans)
    per_device = _CORES_PER_DEVICE.get(platform or "")
    if per_device is None:
        return None
    return neuron_devices() * per_device // (LOGICAL.get() if platform in _JOINED else 1)


def check_cores(platform: str | None, local: int, cores: int | None) -> None:
    """Raise BackendError for a number of processes on this host that the hardware does not support."""
    if cores is not None and local > cores:
        raise BackendError(
            f"{local} processes were started on this host, which shows {cores} NeuronCores, and each needs "
            f"one: start {cores}, or make more visible ({CORES.name})"
        )
    if platform == "trn1" and not _trn1(local):
        raise BackendError(f"{local} processes on a Trn1 host: {_TRN1_RULE}")


def surprises() -> list[str]:
    """What is known to hang or to surprise on AWS's native PyTorch as this machine is set up: for ``tpcore doctor``."""
    if LIMITS.is_set:
        return [f"a stand-in on the CPU, for {LIMITS.name}={LIMITS.text()}"]
    found = []
    if not any(Path(_FABRIC).glob("*")) and HOST_CC.get() != "1":
        found.append(f"There is no EFA here: without {HOST_CC.name}=1 tensor parallelism hangs, users say")
    if CORES.get() and CORES.get() != LOCAL_RANK.text():
        found.append(f"{CORES.name}={CORES.get()} is for all processes: leave it unset, each finds its own core")
    if not CACHE.is_set:
        found.append(
            f"Compiled programs go to {CACHE.default}, and with the container: {CACHE.name} names a lasting folder"
        )
    return [*found, "Operators that the device lacks run on the CPU without a word: torch_neuronx.get_fallback_ops()"]


def check_native(cores: int | None) -> None:
    """Raise BackendError for what AWS's native PyTorch does not start with. ``cores``: of this host."""
    check_cores(None, LOCAL_WORLD_SIZE.get(), cores)
    if any(sign in CORES.get() for sign in ",-"):
        raise BackendError(
            f"{CORES.name}={CORES.get()}: each process of the native backend opens one core, and finds it itself: "
            "leave the variable unset"
        )


def check_tp(platform: str | None, group: Group) -> None:
    """Raise BackendError for tensor-parallel groups that the hardware cannot connect."""
    if platform == "trn1" and not _trn1(group.size):
        raise BackendError(f"tp={group.size} on Trn1: {_TRN1_RULE}; contiguous groups of another size have no ring")


def _trn1(n: int) -> bool:
    return n in (1, 2, 8, 16) or n % 32 == 0


def target() -> str | None:
    """``trn1``, ``inf2``, ``trn2``...; None without torch_neuronx."""
    if module_spec("torch_neuronx") is None:
        return None
    from torch_neuronx.utils import get_platform_target

    return str(get_platform_target())


def module_keys(names: Iterable[str]) -> dict[str, str]:
    """Names under which a module can register weights, and the weights' own names."""
    return {f"w{i}": name for i, name in enumerate(sorted(names))}


def compile_module(module: nn.Module, examples: Sequence[Tensor], path: Path, options: CompilerOptions) -> None:
    """Compile ``module`` for NeuronCores, without its weights, and write it. ``examples``: on the CPU."""
    import torch_neuronx

    compiler_args = {"compiler_args": list(options.args)} if options.args else {}
    with TemporaryDirectory(prefix="tpcore-neuronx-") as temporary:
        # a directory for each program: a model with buckets has several
        workdir = Path(temporary) if options.workdir is None else Path(options.workdir, path.parent.name)
        workdir.mkdir(parents=True, exist_ok=True)
        traced = torch_neuronx.trace(
            module, tuple(examples), compiler_workdir=str(workdir), inline_weights_to_neff=False, **compiler_args
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
            torch_neuronx.replace_weights(module, {k: weights[n].cpu() for k, n in module_keys(weights).items()})
            versions[:] = now
        return list(module(*ranks, *(t.cpu() for t in inputs)))

    return call
