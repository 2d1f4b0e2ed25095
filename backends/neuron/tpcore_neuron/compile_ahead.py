"""Finds the programs of a training script without a device, for ``tpcore compile``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb

from tpcore.backend.interface import ProgramInfo
from tpcore.errors import BackendError, described
from tpcore.extras import module_spec
from tpcore.log import inform_of_start
from tpcore.processes.launch import launch
from tpcore.settings import CHECK, environment

from . import platform
from .replicas.stablehlo import HloProgram
from .settings import AUTOLOAD, COMPILE_ONLY, EXTRACT_ONLY, LIMITS, TARGET
from .stand_in.limits import SDK
from .testing import programs, run_replicas

HOUR = 3600.0


def compile_ahead(command: Sequence[str], world: int | None) -> list[ProgramInfo]:
    """Run ``command`` on replicas and describe each distinct program. On a machine with the Neuron tools,
    ``neuron_parallel_compile`` then runs it too and compiles its programs into the cache."""
    world, script = _parse(list(command), world)
    inform_of_start(world)
    # scripts written for neuron_parallel_compile check this variable before they act on a value
    programs = run_replicas(_run_script, world, script, timeout=HOUR, env={EXTRACT_ONLY.name: "1"})[0]
    tool = shutil.which("neuron_parallel_compile")
    if tool is not None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
        _run_tool([tool, *torchrun, *script], environment())
    first = {p.digest: p for p in reversed(programs)}
    return [_info(first[digest], times) for digest, times in Counter(p.digest for p in programs).items()]


def compile_native(command: Sequence[str], world: int | None) -> list[ProgramInfo]:
    """Run ``command`` on the stand-in and describe each graph that it has compiled. Where AWS's native PyTorch is
    installed, it then runs the command too, as a compiler alone, which fills its cache without a device."""
    world, script = _parse(list(command), world)
    # checks of every call keep torch.compile from making graphs
    stand_in = {LIMITS.name: LIMITS.text() or SDK, AUTOLOAD.name: "0", CHECK.name: "0"}
    programs = launch(_run_natively, world, args=(script,), timeout=HOUR, env=stand_in)[0]
    if platform.installed("torch-neuronx") is not None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
        chip = {COMPILE_ONLY.name: "1", TARGET.name: TARGET.get()}
        variables = {name: value for name, value in environment().items() if name != LIMITS.name}
        _run_tool([*torchrun, *script], variables | chip)
    return [replace(info, runs=runs) for info, runs in programs.items()]


def _run_tool(words: list[str], variables: Mapping[str, str]) -> None:
    if code := subprocess.run(words, check=False, env=variables).returncode:
        raise BackendError(f"{' '.join(words)} {described(code)}: what it printed has the reason")


def _run_natively(script: list[str]) -> dict[ProgramInfo, int]:
    from .stand_in.device import install  # the other road's torch lacks what it is made of

    _run(script)
    return dict(install().programs)


def _parse(command: list[str], world: int | None) -> tuple[int, list[str]]:
    """(number of ranks, script with its arguments) of ``python ...`` or ``torchrun ...``."""
    name = Path(command[0]).name if command else ""
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(command[1:])
        script = ["-m"] * bool(options.module) + [options.training_script, *options.training_script_args]
        return world or int(options.nproc_per_node) * int(options.nnodes.split(":")[-1]), script
    if not name.startswith("python") or len(command) < 2:
        raise BackendError(
            f"cannot compile {' '.join(command) or 'nothing'}: give what starts one rank, as in\n"
            "    tpcore compile --nprocs 2 -- python train.py --steps 10"
        )
    return world or 1, command[1:]


def _run_script(script: list[str]) -> list[HloProgram]:
    _run(script)
    return [p for p in programs() if p.operations]


def _run(script: list[str]) -> None:
    path, *arguments = script[1:] if script[0] == "-m" else script
    if script[0] == "-m":
        spec = module_spec(path)
        if spec is None or spec.origin is None:
            raise BackendError(f"there is no module {path}")
        path = spec.origin
    if not Path(path).is_file():
        raise BackendError(f"there is no script {path}")
    sys.argv[:] = [path, *arguments]
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    code = compile(Path(path).read_text(), path, "exec", dont_inherit=True)
    try:
        exec(code, {"__name__": "__main__", "__file__": path, "__builtins__": __builtins__})
    except SystemExit as end:
        if end.code not in (None, 0):
            raise BackendError(f"{path} ended with status {end.code}") from end
    except BackendError:  # of the job, which says who has failed first
        raise
    except Exception as e:
        lines = [f" at line {f.lineno}" for f in extract_tb(e.__traceback__) if f.filename == path]
        raise BackendError(f"{path} fails{lines[-1] if lines else ''}: {type(e).__name__}: {e}") from e


def _info(program: HloProgram, runs: int) -> ProgramInfo:
    kinds = Counter((c.kind, len(c.groups[0])) for c in program.collectives)
    collectives = ", ".join(f"{n} {kind} over {size}" for (kind, size), n in kinds.items())
    return ProgramInfo(program.digest, program.site, runs, program.operations, collectives, program.parameter_bytes)
