"""A backend that records collectives instead of making them, on meta tensors: shapes without values."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tpcore.backend.interface import Backend, Capabilities
from tpcore.checkpoint.storage.tensorfile import nbytes_of
from tpcore.comm.signature import library
from tpcore.comm.transport import PRIMITIVES, Primitive
from tpcore.comm.wrapper import TransportWrapper
from tpcore.layout.mesh import Group
from tpcore.nested import tensors
from tpcore.private import backward_node
from tpcore.train.pipeline import PipelinedLayers

_HERE = str(Path(__file__).parent)


class Where(NamedTuple):
    """A module by its name in the model (the model: its class), and the line outside tpcore and torch that calls it."""

    module: str
    site: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one rank. ``shape`` and ``nbytes`` are those of the rank's input."""

    phase: str  # forward, backward, reduction, clipping, optimizer
    axes: tuple[str, ...]  # mesh axes of the group
    size: int  # number of ranks of the group
    op: str  # "all_reduce sum", "all_gather dim 1"
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    module: str  # "" outside of all modules
    site: str  # "path/model.py:20 in forward"; "" if unknown

    @property
    def sent(self) -> int:
        """The least number of bytes that each rank sends, in a ring."""
        return PRIMITIVES[self.op.partition(" ")[0]].sent(self.nbytes, self.size)

    def __str__(self) -> str:
        inside = f" in module {self.module}" if self.module else ""
        at = f" at {self.site}" if self.site else ""
        return f"{self.op} of {self.dtype} {list(self.shape)}, {self.phase}{inside}{at}"


class Recorder:
    """The collectives of one rank, in order, each with its module. In forward this is the innermost running module.
    Backward runs no modules: there it is the module whose forward made the current node of the autograd graph."""

    def __init__(self) -> None:
        self.phase = ""
        self.calls: list[Collective] = []
        self.mistakes: dict[str, None] = {}
        self.failed: Where | None = None
        """The module that raised."""
        self.pipelines: dict[str, tuple[PipelinedLayers, Tensor]] = {}
        """By name those that ran, with their input."""
        self._running: list[Where] = []
        self._makers: dict[Any, Where] = {}  # by node; it keeps nodes alive, so that no id is reused

    def note(self, op: str, x: Tensor, group: Group) -> None:
        kind = op, tuple(x.shape), str(x.dtype).removeprefix("torch."), nbytes_of(x)
        self.calls.append(Collective(self.phase, group.axes, group.size, *kind, *self._where()))

    def mistake(self, problem: str) -> None:
        """Note a mistake, with its module and line."""
        where = self._where()
        inside = f"{where.module}: " if where.module else ""
        self.mistakes[f"{inside}{problem}" + (f" ({where.site})" if where.site else "")] = None

    @property
    def module(self) -> str:
        """The module that computes now; "" if it cannot be told."""
        if self._running:
            return self._running[-1].module
        node = backward_node()
        return "" if node is None or node not in self._makers else self._makers[node].module

    def _where(self) -> Where:
        if self._running:  # in backward too, if checkpointing runs a part of forward again
            return Where(self._running[-1].module, _site() or self._running[-1].site)
        node = backward_node()
        return Where("", _site()) if node is None else self._makers.get(node, Where("", ""))

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the running modules of ``model`` inside the block."""
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._entering, name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str, module: nn.Module, inputs: Any, named: Any) -> None:
        if self._running:
            self._mark((inputs, named), self._running[-1])  # made before this module is entered
        if isinstance(module, PipelinedLayers):
            self.pipelines[name] = module, inputs[0] if inputs else next(iter(named.values()))
        self._running.append(Where(name or type(module).__name__, _site() or _definition(module)))

    def _leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        where = self._running.pop()
        if sys.exc_info()[0] is not None:
            self.failed = self.failed or where  # the innermost module leaves first
        self._mark(output, where)

    def _mark(self, value: Any, maker: Where) -> None:
        """Set ``maker`` for every autograd node behind ``value`` that has no maker yet."""
        todo = [t.grad_fn for t in tensors(value) if t.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node not in self._makers:
                self._makers[node] = maker
                todo += [before for before, _ in node.next_functions if before is not None]


def _site() -> str:
    """The innermost frame outside tpcore and torch, within the recorded step."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*library(), "<")):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if name.startswith(_HERE) and name != __file__:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _definition(module: nn.Module) -> str:
    """The definition of a module's forward. The model itself has only this: no user line calls it."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or code.co_filename.startswith((*library(), "<")):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


class RecordingTransport(TransportWrapper):
    """Its results have the right shape and dtype, but no values: reading one raises an error of torch."""

    compares = True  # the ranks are compared after all are recorded

    def __init__(self, group: Group, rank: int, recorder: Recorder) -> None:
        super().__init__(group, rank, torch.device("meta"))
        self._recorder = recorder

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        self._recorder.note(primitive.describe(*arguments), x, self.group)
        return primitive.result(x.detach(), self.size, *arguments)


class RecordingBackend(Backend):
    """One rank of a job whose other ranks need not exist."""

    interface = 2
    transport_class = RecordingTransport
    capabilities = Capabilities(
        dtypes=(*Capabilities.dtypes, torch.int16, torch.int8), moved=(torch.complex64, torch.complex128)
    )

    def __init__(self, rank: int, world: int, recorder: Recorder) -> None:
        self._rank, self._world, self._recorder = rank, world, recorder

    def start(self, timeout: float) -> tuple[int, int]:
        return self._rank, self._world

    def connect(self, group: Group, rank: int) -> RecordingTransport:
        return RecordingTransport(group, rank, self._recorder)

    def device(self) -> torch.device:
        return torch.device("meta")
