"""The interface of a plugin: its Backend class and the hook that returns it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import pluggy
import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.transport import Transport
from ..errors import BackendError
from ..layout.mesh import Group
from .capabilities import Capabilities
from .programs import CompilerOptions, Dims, Function, LoadedProgram

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

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this backend cannot run on this machine, or None if it can. It avoids heavy imports where
        possible."""
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
        """The transport for this rank's part of ``group``. All ranks call it in the same order, for groups of
        one too."""

    def adopt(self, process_group: Any) -> Transport:
        """The transport for a group object that the user made with the backend's own library."""
        raise BackendError(f"{type(self).__name__} cannot use the group {process_group!r}: pass a tpcore Comm")

    @final
    def comm(self, group: Group, rank: int) -> Comm:
        """Collectives over ``group``, checked."""
        return self._bound(self.connect(group, rank), "connect")

    @final
    def comm_of(self, process_group: Any) -> Comm:
        """Collectives over the user's own group object, checked."""
        return self._bound(self.adopt(process_group), "adopt")

    def _bound(self, made: Transport, by: str) -> Comm:
        if not isinstance(made, Transport):
            raise BackendError(f"{type(self).__name__}.{by}() returned {made!r}, not a tpcore Transport")
        return Comm(made, self.capabilities.sums())

    @abstractmethod
    def device(self) -> torch.device:
        """The device of this rank's tensors."""

    @classmethod
    def memory_of(cls, t: Tensor) -> object:
        """A key that is equal for tensors that view the same memory in the same way: tied weights, and a
        weight and its ``detach()``. A checkpoint stores such tensors once."""
        try:
            memory = t.untyped_storage().data_ptr()
        except RuntimeError:  # sparse tensors, and devices whose storage Python cannot access
            return id(t)
        view = t.device, t.dtype, t.storage_offset(), t.shape, t.stride(), t.is_conj(), t.is_neg()
        # lazy devices give no address, and empty tensors have none
        return (memory, view) if memory else id(t)

    def stop(self) -> None:
        """Leave the job."""

    def gone(self, rank: int) -> str | None:
        """How the process of ``rank`` ended: "was killed by SIGKILL". None while it runs or if that is
        unknown. Called while other ranks work on their own, so it makes no collective."""
        return None

    def mark_step(self) -> None:
        """End of a training step: a lazy backend cuts its graph here."""

    # -- traced models: methods of a backend that declares ``tracing`` ------------------------------------
    @classmethod
    def most_ranks(cls) -> int | None:
        """How many ranks can run on this machine; None if unknown."""
        return None

    @classmethod
    def job(cls, folder: Path) -> dict[str, str]:
        """Environment variables with which the processes of one job on this machine find each other, in
        addition to RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. ``folder``: empty, for this job."""
        raise BackendError(f"{cls.__name__} starts no processes")

    def compile_with(self, options: CompilerOptions) -> bool:
        """Use ``options`` for what ``trace`` compiles from now on. False: this backend compiles nothing."""
        return False

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        """Write ``fn`` as one program for all ranks into ``folder``, which is empty.

        Every rank calls it inside ``tpcore.use``; rank 0 writes. Weights, inputs and the rank become inputs
        of the program, which contains none of their values. ``dims``: the dynamic dimensions of each input.
        Raises BackendError on all ranks if they would need different programs.
        """
        raise BackendError(f"{type(self).__name__} traces no models")

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        """Load the program that ``trace`` wrote, to run on this rank. ``weights`` may change in place later.

        Raises BackendError for files that are damaged or would run code of their own.
        """
        raise BackendError(f"{type(self).__name__} runs no traced models")

    def get_rng_state(self) -> Tensor:
        """The state of the generator for dropout on ``device()``."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator for dropout on ``device()``."""
        torch.default_generator.manual_seed(seed)
