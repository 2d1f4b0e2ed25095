"""Runs a script as it is, by one process and by several ranks, and compares what they recorded."""

from __future__ import annotations

import os
import random
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tpcore import settings
from tpcore.log import inform
from tpcore.processes.launch import launch
from tpcore.runtime.context import current, is_initialized
from tpcore.runtime.init import shutdown

from .degrees import one_of_each
from .first import first_difference
from .record import ScriptRecorder, Trace, keeps_float64
from .verdict import ScriptVerdict

DTYPES = FLOAT64, OWN, BITS = "float64", "own", "bits"
_LESS = (torch.float32, torch.bfloat16, torch.float16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)
_DROPOUT = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)


class ScriptError(Exception):
    """The script failed before there was anything to compare."""


class ScriptMode(TorchFunctionMode):
    """Shows a recorder the losses and the masks of dropout, which drops nothing here: what ranks have parts of is
    dropped by other draws than one process makes. ``double``: float64 stands for narrower types."""

    def __init__(self, recorder: ScriptRecorder, double: bool) -> None:
        super().__init__()
        self._recorder, self._double = recorder, double

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(func, args, kwargs)
        if func in _DROPOUT:
            self._recorder.mask(func(*args, **kwargs))
            return args[0]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        if func is functional.multi_head_attention_forward:
            kwargs["training"] = False  # which is asked only for dropout
        if self._double:
            func = Tensor.double if func in _NARROWING else func
            args = [torch.float64 if _narrow(a) else a for a in args]
            kwargs = {name: torch.float64 if _narrow(v) else v for name, v in kwargs.items()}
        return func(*args, **kwargs)

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A mode is off inside of a function that it has seen: modules whose forward backward computes again turn this
        on for themselves."""
        if func is Tensor.backward:
            self._recorder.loss(args[0])
        before, self._recorder.mode = self._recorder.mode, self
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.mode = before


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _LESS


def verify_script(
    script: Path,
    arguments: Sequence[str] = (),
    ranks: int = 2,
    *,
    steps: int = 2,
    dtype: str | None = None,
    env: Mapping[str, str] | None = None,
) -> ScriptVerdict:
    """Run ``script`` in one process and in ``ranks``, and compare the first ``steps`` of its optimizer. ``dtype``: None
    is float64 where the script's device keeps that. ScriptError where it fails, or trains nothing."""
    if dtype is not None and dtype not in DTYPES:
        raise ScriptError(f"--dtype takes {', '.join(DTYPES)}, not {dtype!r}")
    if not script.is_file():
        raise ScriptError(f"there is no file {script}")
    with TemporaryDirectory() as folder:

        def run(name: str, size: int, noise: bool = False) -> list[Trace]:
            args = (str(script), list(arguments), f"{folder}/{name}", steps, kind, noise, name != "ranks")
            try:
                launch(_recorded, size, args=args, env=env)
            except Exception as e:
                who = f"{size} ranks" if name == "ranks" else "one process"
                raise ScriptError(f"{script} fails in {who}: {type(e).__name__}: {e}") from e
            return [Trace.load(f"{folder}/{name}-{rank}.pt") for rank in range(size)]

        kind = dtype or FLOAT64
        (alone,) = run("alone", 1)
        if alone.narrow:
            if dtype is not None:
                raise ScriptError(f"{script} trains on a device without {dtype}: --dtype own or bits")
            inform(f"verify: the device of {script} has no float64, so that this is --dtype own")
            kind = OWN
            (alone,) = run("alone", 1)
        if not alone.entries:
            raise ScriptError(f"{script} calls no module: there is nothing to compare")
        noisy = run("noisy", 1, noise=True)[0] if kind == OWN and not (alone.exact and dtype is None) else None
        return first_difference(alone, run("ranks", ranks), noisy, bits=kind == BITS)


def _recorded(script: str, arguments: list[str], file: str, steps: int, dtype: str, noise: bool, alone: bool) -> None:
    """This rank's run, which ends after so many steps."""
    double = dtype == FLOAT64
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    random.seed(0)
    torch.manual_seed(0)
    if double:
        torch.set_default_dtype(torch.float64)
    recorder = ScriptRecorder(steps, noise=noise, double=double)
    try:
        quiet = redirect_stdout(StringIO())
        with quiet, one_of_each(alone), recorder, ScriptMode(recorder, double):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        if e.code not in (0, None):
            raise
    except Exception:  # of layers that refuse float64 as they are made
        recorder.trace.narrow = double and is_initialized() and not keeps_float64(current().device)
        if not recorder.trace.narrow:
            raise
    recorder.trace.save(f"{file}-{settings.RANK.get()}.pt")
    if is_initialized():
        shutdown()
