"""Reads of values that XLA has not computed yet: a warning in debug mode, an error while tracing."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla
from torch import Tensor

from tpcore.comm.signature import call_site, library
from tpcore.errors import BackendError

READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")
Before = Callable[[Tensor, Sequence[Any]], None]
"""What to do with a tensor on XLA before its value is read, with the other arguments."""
_reported: set[str] = set()


def preceded(read: Any, before: Before) -> Any:
    """``read``, a method of tensors, that calls ``before`` first where its tensor is on XLA."""

    @functools.wraps(read)
    def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "xla":
            before(self, (*args, *kwargs.values()))
        return read(self, *args, **kwargs)

    return reading


def leaves_device(arguments: Sequence[Any]) -> bool:
    """Whether ``Tensor.to`` with these arguments moves a tensor on XLA to another device."""
    devices = [x.device if isinstance(x, Tensor) else x for x in arguments]
    return any(torch.device(d).type != "xla" for d in devices if isinstance(d, str | torch.device))


@functools.cache  # once in a process
def watch() -> None:
    """From now on, until the process ends, warn once for each place that reads such a value."""
    for name in READS:
        setattr(Tensor, name, preceded(getattr(Tensor, name), functools.partial(_warn, name)))


def _warn(name: str, t: Tensor, arguments: Sequence[Any]) -> None:
    pending = torch_xla._XLAC._check_tensor_need_materialization([t])[0]
    if sys._getframe(2).f_code.co_filename.startswith(library()) or not pending:
        return  # tpcore itself reads between steps, e.g. for a checkpoint
    code, line = call_site()
    where = f"{code.co_filename}:{line}"
    if where in _reported:
        return
    _reported.add(where)
    warnings.warn(
        f"{name} at {where} reads a value that is not computed yet: the step is cut into two programs "
        "there, and the host waits. Read it after the step (mark_step), or from xm.add_step_closure",
        stacklevel=3,
    )


@contextmanager
def refused() -> Iterator[None]:
    """Raise BackendError for reads inside the block, where a program is traced: it has no values, and XLA
    would end the process."""
    saved = {name: getattr(Tensor, name) for name in (*READS, "cpu", "to")}
    for name, read in saved.items():
        setattr(Tensor, name, preceded(read, functools.partial(_refuse, name)))
    try:
        yield
    finally:
        for name, read in saved.items():
            setattr(Tensor, name, read)


def _refuse(name: str, t: Tensor, arguments: Sequence[Any]) -> None:
    if name == "to" and not leaves_device(arguments):
        return
    code, line = call_site()
    raise BackendError(
        f"{name} at {code.co_filename}:{line} reads a value, and a traced model has none: its program must "
        "be the same whatever the values are. Compute with tensors there (torch.where in place of if)"
    )
