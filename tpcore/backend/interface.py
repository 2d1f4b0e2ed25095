"""The interface of a plugin: its Backend class, what it declares, traced programs, and the hook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, final

import pluggy
import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.transport import Transport
from ..errors import BackendError
from ..layout.mesh import Group

Function = Callable[[Mapping[str, Tensor], Sequence[Tensor]], list[Tensor]]
"""A function to trace: it computes outputs from weights by name and from inputs, and from nothing else."""
LoadedProgram = Callable[[Sequence[Tensor]], list[Tensor]]
"""A traced function, loaded, with its weights in place. It returns new tensors at each call."""


@dataclass(frozen=True)
class DynamicDim:
    """A dimension of an input whose size may change between calls, from ``min`` to ``max``, both included. Dimensions
    with the same name have the same size in every call."""

    name: str
    min: int = 1
    max: int | None = None

    def takes(self, n: int) -> bool:
        return n >= self.min and (self.max is None or n <= self.max)

    def __str__(self) -> str:
        return f"{self.name} (from {self.min}" + (" on)" if self.max is None else f" to {self.max})")


@dataclass(frozen=True)
class CompilerOptions:
    """What a caller asks of the compiler of a backend that has one for traced programs."""

    args: tuple[str, ...] = ()
    workdir: str | None = None  # where it leaves its files; None: they are removed


Dims = Sequence[Mapping[int, DynamicDim]]
"""The dynamic dimensions of each input, by index."""


@contextmanager
def traced(comms: Sequence[Comm], positions: Sequence[Tensor], *, operators: bool = False) -> Iterator[None]:
    """``Comm.traced`` for all ``comms``, at ``positions``, which are inputs of the program."""
    with ExitStack() as stack:
        for comm, position in zip(comms, positions, strict=True):
            stack.enter_context(comm.traced(position, comm.operators.at(position) if operators else None))
        yield


_REQUIRED = (torch.float32, torch.int64, torch.uint8)  # for norms, counts, and errors sent to other ranks


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a backend. ``tpcore.testing.conformance`` tests all that is declared. All else is refused early,
    never only at the first collective: by ``tpcore.init``, and a parameter's dtype by the layer's constructor."""

    dtypes: tuple[torch.dtype, ...] = (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )
    """Dtypes that every primitive takes, sums included."""
    moved: tuple[torch.dtype, ...] = ()
    """More dtypes, for primitives that move and do not sum. Complex dtypes listed here are summed too."""
    group_sizes: tuple[int, ...] | None = None
    """Sizes that a group may have in addition to 1; None: any size."""
    exchange_sizes: tuple[int, ...] | None = None
    """Sizes of the groups that have an all-to-all: consecutive ranks, from a multiple of the size on. None: all have.
    Over other groups the members' whole tensors are gathered."""
    unequal_parts: bool = True
    """Whether an all-to-all takes parts of unequal sizes, as which a permute is sent. If not, it is gathered."""
    broadcasts: bool = True
    """Whether a broadcast moves bits. If not, because it is a sum with zeros, it is gathered."""
    whole_sums: bool = True
    """Whether whole numbers of more than 8 bits are summed as such. If not, because the hardware sums them in float32,
    they are gathered, and so are those of a maximum."""
    functional: bool = False
    """Whether graphs of torch.compile hold torch's functional collectives (``_c10d_functional``), for a compiler that
    knows no operators of tpcore. They name no lost rank and compare no calls."""
    tracing: bool = False
    """Whether models can be traced for this backend."""
    dynamic_shapes: bool = True
    """Whether one traced program can take inputs of several sizes."""

    def lack(self) -> str | None:
        """A message about dtypes that tpcore needs and the backend does not declare; None if it has all."""
        missing = ", ".join(_name(d) for d in _REQUIRED if d not in self.dtypes)
        return f"it does not sum {missing}, which tpcore needs" if missing else None

    def sums(self) -> dict[str, frozenset[torch.dtype]]:
        """The dtypes that each reduction takes."""
        ordered = frozenset(self.dtypes)
        return {"sum": ordered | {d for d in self.moved if d.is_complex}, "max": ordered}

    def exchanges(self, members: Sequence[int]) -> bool:
        """Whether the group of ``members`` has an all-to-all."""
        size, first = len(members), members[0]
        aligned = first % size == 0 and tuple(members) == tuple(range(first, first + size))
        return self.exchange_sizes is None or (size in self.exchange_sizes and aligned)

    def misfit(self, sizes: Mapping[str, int]) -> str | None:
        """A message about the first group that this backend cannot form, or None. ``sizes``: by name."""
        for name, size in sizes.items():
            if self.group_sizes is not None and size not in (1, *self.group_sizes):
                return f"a {name} group of {size} ranks; it forms groups of {list(self.group_sizes)}"
        return None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {k: [_name(d) for d in out[k]] for k in ("dtypes", "moved")}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PROJECT = "tpcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

INTERFACE = 2
"""Version of the plugin interface: ``Backend``, ``Transport``, ``Capabilities`` and the hook. It goes up when
a correct backend would become incorrect. A new method with a default does not change it."""


@dataclass(frozen=True)
class ProgramInfo:
    """One program of a compiling backend, as ``tpcore compile`` lists it."""

    digest: str
    site: str  # the script's line that runs it: "train.py:20 in step"
    runs: int
    operations: int
    collectives: str  # "4 all_reduce add over 2, ..."
    parameter_bytes: int


class Backend(ABC):
    """One way to run collectives. A plugin's hook returns the class; ``tpcore.init`` makes the instance."""

    interface: ClassVar[int] = 1
    """The version of the plugin interface that the class was written for. Every plugin sets it."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    transport_class: ClassVar[type[Transport] | None] = None
    """The class that ``connect`` returns. If it lacks a method, the error comes before the job starts."""
    _plugin: ClassVar[str]
    """Name, distribution and version, for messages, of a class that was loaded as a plugin."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this backend cannot run on this machine, or None if it can. It avoids heavy imports where possible."""
        return None

    @classmethod
    def remark(cls) -> str:
        """One sentence on how this machine carries the collectives; empty where nothing is to choose."""
        return ""

    @classmethod
    def compile_ahead(cls, command: Sequence[str], world: int | None) -> list[ProgramInfo]:
        """Find the programs that ``command`` (``python train.py ...``) runs on ``world`` ranks, and compile
        them into a cache if this machine has the compiler. ``world`` None: the command's own number, or 1."""
        raise BackendError(f"{cls.__name__} compiles nothing ahead of time: run the script as it is")

    @abstractmethod
    def start(self, timeout: float) -> tuple[int, int]:
        """Join the job; return (rank, world size). ``timeout``: seconds a collective may wait."""

    @abstractmethod
    def connect(self, group: Group, rank: int) -> Transport:
        """The transport for this rank's part of ``group``, one of size 1 too. All ranks call it in the same order."""

    def adopt(self, process_group: Any) -> Transport:
        """The transport for a group object that the user made with the backend's own library."""
        raise BackendError(f"{type(self).__name__} cannot use the group {process_group!r}: pass a tpcore Comm")

    @final
    def comm(self, group: Group, rank: int) -> Comm:
        """Collectives over ``group``, checked."""
        try:
            transport = self.connect(group, rank)
        except TypeError as e:
            if "abstract" not in str(e):
                raise
            origin = vars(type(self)).get("_plugin", type(self).__module__)  # not that of a base
            raise BackendError(f"{origin}: {type(self).__name__}.connect() makes an unfinished Transport: {e}") from e
        return self._bound(transport, "connect")

    @final
    def comm_of(self, process_group: Any) -> Comm:
        """Collectives over the user's own group object, checked."""
        return self._bound(self.adopt(process_group), "adopt")

    def _bound(self, transport: Transport, method: str) -> Comm:
        if not isinstance(transport, Transport):
            raise BackendError(f"{type(self).__name__}.{method}() returned {transport!r}, not a tpcore Transport")
        return Comm(transport, self.capabilities.sums())

    @abstractmethod
    def device(self) -> torch.device:
        """The device of this rank's tensors."""

    @classmethod
    def memory_of(cls, t: Tensor) -> object:
        """A key, equal for tensors that view the same memory in the same way: tied weights, and a weight and its
        ``detach()``. A checkpoint stores such tensors once."""
        try:
            memory = t.untyped_storage().data_ptr()  # 0 on lazy devices, and of empty tensors
        except RuntimeError:  # sparse tensors, and devices whose storage Python cannot access
            return id(t)
        view = t.device, t.dtype, t.storage_offset(), t.shape, t.stride(), t.is_conj(), t.is_neg()
        return (memory, view) if memory else id(t)

    def stop(self) -> None:
        """Leave the job."""

    def gone(self, rank: int) -> str | None:
        """How the process of ``rank`` ended: "was killed by SIGKILL". None while it runs or if that is
        unknown. Called while other ranks work on their own, so it makes no collective."""
        return None

    def mark_step(self) -> None:
        """End of a training step: a lazy backend cuts its graph here."""

    def grouped_matmul(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor | None:
        """A fused kernel for layers of experts: rows up to ``ends[i]`` of ``x`` ``[R, K]``, from where those of ``i -
        1`` end, times ``weights[i]`` of ``[E, K, N]``, which may be transposed views -> ``[R, N]``, with gradients of
        both. ``ends``: ``[E]`` of int32, whose values are data. Rows behind the last are not used. None, the default,
        where there is no kernel: the layers use torch's ``grouped_mm``, as transformers does."""
        return None

    # -- traced models: methods of a backend that declares ``tracing`` ------------------------------------
    @classmethod
    def most_ranks(cls) -> int | None:
        """How many ranks can run on this machine; None if unknown."""
        return None

    @classmethod
    def job(cls, folder: Path) -> dict[str, str]:
        """Environment variables, beside those of ranks and sizes, with which the processes of one job on this machine
        find each other. ``folder``: empty, for this job."""
        raise BackendError(f"{cls.__name__} starts no processes")

    def compile_with(self, options: CompilerOptions) -> bool:
        """Use ``options`` for what ``trace`` compiles from now on. False: this backend compiles nothing."""
        return False

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        """Write ``fn`` as one program for all ranks into ``folder``, which is empty. Every rank calls it inside
        ``tpcore.use``; rank 0 writes. Weights, inputs and the rank become inputs of the program, which contains none
        of their values. BackendError on all ranks if they would need different programs."""
        raise BackendError(f"{type(self).__name__} traces no models")

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        """Load the program that ``trace`` wrote, to run on this rank. ``weights`` may change in place later.
        BackendError for files that are damaged or would run code of their own."""
        raise BackendError(f"{type(self).__name__} runs no traced models")

    def get_rng_state(self) -> Tensor:
        """The state of the generator for dropout on ``device()``."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator for dropout on ``device()``."""
        torch.default_generator.manual_seed(seed)
