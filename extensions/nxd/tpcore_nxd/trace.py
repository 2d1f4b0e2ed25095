"""Tracing and serving with the options of NeuronX Distributed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tpcore import trace
from tpcore.backend.interface import CompilerOptions
from tpcore.checkpoint.read.source import StrPath
from tpcore.log import inform
from tpcore.runtime.context import current
from tpcore.runtime.init import choose_backend
from tpcore.trace import TensorParallelModel, generate, generate_each, parallel_model_save

from .parallel_layers.checkpointing import either

__all__ = ["TensorParallelModel", "generate", "generate_each"]
__all__ += ["parallel_model_load", "parallel_model_save", "parallel_model_trace"]


def parallel_model_trace(
    func: Callable[[], Any],
    inputs: Any = None,
    tp_degree: int = 1,
    *,
    example_inputs: Any = None,
    timeout: float | None = None,
    restart: bool = False,
    compiler_args: str | Sequence[str] | None = None,
    compiler_workdir: StrPath | None = None,
    inline_weights_to_neff: bool = False,
    **options: Any,
) -> TensorParallelModel:
    """``tpcore.trace.parallel_model_trace`` with ``options``, also under the names of NeuronX Distributed.

    ``example_inputs``: another name of ``inputs``. ``timeout``, ``restart``: as in ``parallel_model_load``.
    ``compiler_args``, ``compiler_workdir``: options of the Neuron compiler, and a directory for its files; a backend
    without a compiler logs one line. ``inline_weights_to_neff``: weights are never in the program; True logs that.
    """
    example = either("inputs", inputs, "example_inputs", example_inputs)
    if inline_weights_to_neff:
        inform("inline_weights_to_neff=True: weights stay apart from the program, and can be replaced")
    if compiler_args is not None or compiler_workdir is not None:
        flags = compiler_args.split() if isinstance(compiler_args, str) else compiler_args or ()
        workdir = None if compiler_workdir is None else os.path.abspath(compiler_workdir)
        func = with_compiler(CompilerOptions(tuple(flags), workdir), func, choose_backend(options.get("backend")))
    model = trace.parallel_model_trace(func, example, tp_degree, **options)
    model.timeout, model.restart = timeout, restart
    return model


def parallel_model_load(
    load_dir: StrPath | None = None, *, model_dir: StrPath | None = None, **options: Any
) -> TensorParallelModel:
    """``tpcore.trace.parallel_model_load`` with ``options``. ``model_dir``: another name of ``load_dir``."""
    return trace.parallel_model_load(either("load_dir", load_dir, "model_dir", model_dir), **options)


def with_compiler(options: CompilerOptions, func: Callable[[], Any], backend: str) -> Callable[[], Any]:
    def built() -> Any:
        ctx = current()
        if not ctx.backend.compile_with(options) and ctx.rank == 0:
            inform(f"trace: backend {backend!r} has no compiler, and compiler_args and compiler_workdir go to none")
        return func()

    return built
