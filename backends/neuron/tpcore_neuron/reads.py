"""Debug mode: says where a program reads a value that XLA has not computed yet, which cuts its graph."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import torch_xla
from torch import Tensor

from tpcore.check import call_site

_HERE = str(Path(__file__).parent) + os.sep
_READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")
_told: set[str] = set()


def watch() -> None:
    """From now on warn once for each place that reads such a value. For the life of the process."""
    if not getattr(Tensor.item, "tpcore_watched", False):
        for name in _READS:
            setattr(Tensor, name, _watched(name, getattr(Tensor, name)))


def _watched(name: str, read: Any) -> Any:
    @functools.wraps(read)
    def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "xla" and torch_xla._XLAC._check_tensor_need_materialization([self])[0]:
            code, line = call_site(_HERE)
            where = f"{code.co_filename}:{line}"
            if where not in _told:
                _told.add(where)
                warnings.warn(
                    f"{name} at {where} reads a value that is not computed yet: the step is cut into two "
                    "programs there, and the host waits. Read it after the step (mark_step), or from "
                    "xm.add_step_closure",
                    stacklevel=2,
                )
        return read(self, *args, **kwargs)

    reading.tpcore_watched = True  # type: ignore[attr-defined]
    return reading
