"""Reads of values that XLA has not computed yet: a warning in debug mode, an error while tracing."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch_xla
from torch import Tensor

import tpcore
from tpcore.comm.signature import call_site
from tpcore.errors import BackendError

_HERE = str(Path(__file__).parent) + os.sep
_TPCORE = str(Path(tpcore.__file__).parent) + os.sep
_READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")
_reported: set[str] = set()


def watch() -> None:
    """From now on, until the process ends, warn once for each place that reads such a value."""
    if not getattr(Tensor.item, "tpcore_watched", False):
        for name in _READS:
            setattr(Tensor, name, _watched(name, getattr(Tensor, name)))


def _watched(name: str, read: Any) -> Any:
    @functools.wraps(read)
    def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = sys._getframe(1).f_code.co_filename.startswith(_TPCORE)  # between steps, e.g. for a checkpoint
        if self.device.type == "xla" and not own and _is_pending(self):
            code, line = call_site(_HERE)
            where = f"{code.co_filename}:{line}"
            if where not in _reported:
                _reported.add(where)
                warnings.warn(
                    f"{name} at {where} reads a value that is not computed yet: the step is cut into two programs "
                    "there, and the host waits. Read it after the step (mark_step), or from xm.add_step_closure",
                    stacklevel=2,
                )
        return read(self, *args, **kwargs)

    reading.tpcore_watched = True  # type: ignore[attr-defined]
    return reading


def _is_pending(t: Tensor) -> bool:
    return bool(torch_xla._XLAC._check_tensor_need_materialization([t])[0])


@contextmanager
def refused() -> Iterator[None]:
    """Raise BackendError for reads inside the block, where a program is traced: it has no values, and XLA
    would end the process."""
    saved = {name: getattr(Tensor, name) for name in (*_READS, "cpu", "to")}
    for name, read in saved.items():
        setattr(Tensor, name, _refusing(name, read))
    try:
        yield
    finally:
        for name, read in saved.items():
            setattr(Tensor, name, read)


def _refusing(name: str, read: Any) -> Any:
    @functools.wraps(read)
    def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "xla" and (name != "to" or _leaves_device(*args, *kwargs.values())):
            _refuse(name)
        return read(self, *args, **kwargs)

    return reading


def _leaves_device(*given: Any) -> bool:
    devices = [g.device if isinstance(g, Tensor) else g for g in given]
    return any(torch.device(d).type != "xla" for d in devices if isinstance(d, str | torch.device))


def _refuse(name: str) -> NoReturn:
    code, line = call_site(_HERE)
    raise BackendError(
        f"{name} at {code.co_filename}:{line} reads a value, and a traced model has none: its program must "
        "be the same whatever the values are. Compute with tensors there (torch.where in place of if)"
    )
