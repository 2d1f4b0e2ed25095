"""A model traced on processes of this machine, saved, and loaded again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backend.registry import backend_class, check_held
from ..checkpoint.read.source import StrPath
from ..checkpoint.storage.files import MANIFEST, make_dirs, naming, sync_dir, write_file
from ..checkpoint.storage.publish import OwnedDirectory, Staging, link, resolve
from ..errors import BackendError, CheckpointError
from ..processes.launch import launch
from ..runtime.init import choose_backend
from .artifact import FORMAT, PROGRAMS, opened
from .make.tracing import CallArguments, Order, assembled, trace_rank
from .serve.model import TensorParallelModel


def parallel_model_trace(
    func: Callable[[], Any],
    inputs: Any,
    tp_degree: int = 1,
    *,
    backend: str | None = None,
    dynamic_shapes: Any = None,
    bucket_inputs: Sequence[Any] | None = None,
    pad_value: float | Mapping[str, float] = 0,
) -> TensorParallelModel:
    """Trace the model that ``func()`` returns, on ``tp_degree`` processes of this machine.

    A model that is padded must ignore padding. Options of a compiler: ``tpcore.current().backend.compile_with`` in
    ``func``. An error of a process is raised here, with its traceback.

    Args:
        func: called in each process, after ``tpcore.init``; it may be a closure. It returns the model with loaded
            weights, or ``(model, aliases)``, which maps parameters and buffers to positions of outputs: such an output
            is not returned, but becomes the value of the parameter or buffer for the next call, as of a key-value
            cache.
        inputs: a tensor, a tuple or list of arguments, or a dict of keyword arguments. Numbers and strings among them
            are fixed in the program.
        tp_degree: how many processes.
        backend: as in ``tpcore.init``.
        dynamic_shapes: other sizes, as in ``torch.export``: for each argument a dict from dimension to
            ``torch.export.Dim`` or to a name.
        bucket_inputs: other sizes, by examples: a call is padded to the smallest bucket that it fits, and the outputs
            are cut back.
        pad_value: what a call is padded with, one value, or one per argument.

    Raises:
        ValueError: the machine cannot hold that many ranks.
        BackendError: the ranks would need different programs, or the program computes wrong outputs.
    """
    if dynamic_shapes is not None and bucket_inputs is not None:
        raise ValueError("dynamic_shapes and bucket_inputs are alternatives: give one")
    name = choose_backend(backend)
    _check_degree(tp_degree, name)
    if dynamic_shapes and not backend_class(name).capabilities.dynamic_shapes:
        raise BackendError(
            f"backend {name!r} has programs of fixed sizes only, and takes no dynamic_shapes: give examples "
            "of the sizes that are needed as bucket_inputs"
        )
    calls = sorted((call_of(e) for e in (inputs, *(bucket_inputs or ()))), key=elements_of)
    directory = OwnedDirectory("tpcore-trace-")
    folder = Path(directory.name)
    order = Order(func, calls, dynamic_shapes, name, tp_degree, folder, uuid.uuid4().hex)
    try:
        manifest = assembled(order, launch(trace_rank, nprocs=tp_degree, args=(order,)), pad_value)
    except BaseException:
        directory.cleanup()
        raise
    return TensorParallelModel(folder, manifest, owned=directory)


def parallel_model_save(model: TensorParallelModel, save_dir: StrPath) -> None:
    """Write a traced model, with its current weights, as the directory ``save_dir``, whole or not at all. Replaces an
    earlier one. CheckpointError if the directory cannot be written, or holds other files."""
    if not isinstance(model, TensorParallelModel):
        raise TypeError(f"parallel_model_save takes what parallel_model_trace returned, not a {type(model).__name__}")
    staging = Staging(os.path.realpath(save_dir), uuid.uuid4().hex, FORMAT, {PROGRAMS})
    try:
        where = Path(staging.path)
        for name in model.manifest.files:
            source = (model.weights_folder if name.startswith("tp_rank_") else model.folder) / name
            make_dirs(str((where / name).parent))
            if not source.is_file():
                raise CheckpointError(f"{source} is gone; the model was closed, or its directory removed")
            with naming("write", str(where / name)):  # hard links where they can be: nobody changes the files in place
                link(str(source), str(where / name))
        write_file(str(where / MANIFEST), [model.manifest.to_json()])
        for folder in {path.parent for path in where.rglob("*")}:
            sync_dir(str(folder))
        staging.commit()
    finally:
        staging.close()


def parallel_model_load(
    load_dir: StrPath, *, timeout: float | None = None, restart: bool = False, verify: bool = False
) -> TensorParallelModel:
    """Load a traced model and start its processes, one per rank, on this machine.

    The model's Python code is not needed. Weights are mapped from their files, which must therefore stay.
    ``timeout``: seconds that a call may take. ``restart``: start processes that were lost again in the next call.
    ``verify``: compare the checksums of weights as well as those of programs, which reads all of them.

    A program is code: load only files that you trust. CheckpointError for files that are missing, damaged, or
    of another version. ValueError if the machine cannot hold that many ranks."""
    folder = Path(resolve(os.path.realpath(load_dir)))
    manifest = opened(folder, verify=verify)
    _check_degree(manifest.tp, manifest.backend)
    return TensorParallelModel(folder, manifest, timeout=timeout, restart=restart).start()


def _check_degree(tp: Any, backend: str) -> None:
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ValueError(f"tp_degree must be a whole number of ranks, 1 or more, not {tp!r}")
    cls = backend_class(backend)
    untraced = None if cls.capabilities.tracing else f"it traces no models with torch {torch.__version__}"
    if why := cls.unavailable() or untraced:
        raise BackendError(f"backend {backend!r} cannot run traced models here: {why}")
    check_held(backend, tp, "tp_degree")


def call_of(inputs: Any) -> CallArguments:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor | tuple | list):
        return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {}
    raise TypeError(f"inputs must be a tensor, a tuple, a list or a dict, not a {type(inputs).__name__}")


def elements_of(call: CallArguments) -> int:
    return sum(t.numel() for t in (*call[0], *call[1].values()) if isinstance(t, Tensor))
