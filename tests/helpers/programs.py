"""Python programs in processes forked from a server that has imported torch already: seconds less for each.

What a program sees is what it would see as a process of its own: arguments, directory, environment, import
path, streams, the status that it ends with. It has the modules of ``PRELOAD`` in memory, and that is all it has.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

PRELOAD = [
    *("torch", "pytest", "hypothesis", "cloudpickle", "tpcore.trace", "tpcore_cpu_gloo.backend"),
    *("torch._dynamo", "torch.export._trace"),  # optimizers and checked runs import the compiler: as long as torch
]
"""Installed modules: a path of the tests' own does not reach the server. Extensions' tests add theirs."""
PROGRAMS = {"tpcore": "tpcore", "torchrun": "torch.distributed.run"}
"""Console scripts and the modules that they run."""

PATIENCE = 500.0
"""Seconds for a program: against hangs alone. Beside other work, one of 60 s was seen to take 250."""


def context() -> ForkServerContext:
    """Makes processes that the one server forks. It stays until this process ends."""
    methods = get_context("forkserver")
    methods.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return methods


def run(
    words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """``python FILE ...``, ``python -m MODULE ...``, ``tpcore ...`` or ``torchrun ...``, to its end."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context().Process(
            target=_program, args=(list(words), cwd, dict(os.environ if env is None else env), out, err)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, out.read_text(), err.read_text())
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def _program(words: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    if "pytest" in words:  # plugins of its own are among what has been imported
        os.environ["PYTEST_ADDOPTS"] = "-W ignore::pytest.PytestAssertRewriteWarning"
    os.chdir(cwd)
    sys.exit(status(partial(_run, words), out, err))


def status(program: Callable[[], object], out: Path, err: Path) -> int:
    """Run a program to its end, which is that of an interpreter. It prints to these files."""
    for number, path in ((1, out), (2, err)):
        with path.open("a") as f:
            os.dup2(f.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # ranks are unbuffered where these are
    try:
        program()
        return 0
    except SystemExit as e:
        if isinstance(e.code, str):
            sys.stderr.write(f"{e.code}\n")
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001  whatever a program may end with
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out
        sys.stdout.flush()
        sys.stderr.flush()


def _run(words: list[str]) -> None:
    first, *rest = words
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    words = ["-m", PROGRAMS[first], *rest] if first in PROGRAMS else rest
    if words[0] == "-m":
        sys.path[:0] = [os.getcwd(), *path]
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(words[0]).absolute().parent), *path]
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
