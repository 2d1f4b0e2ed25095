"""What a plugin provides, and how it is found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import pluggy
import torch
from torch import Tensor

from ..comm import Comm
from ..errors import BackendError
from ..mesh import Group
from ..transport import Transport
from .capabilities import Capabilities
from .programs import CompilerOptions, Dims, Function, LoadedProgram

PROJECT = "tpcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

INTERFACE = 2
"""Version of the plugin interface: of ``Backend``, ``Transport``, ``Capabilities`` and the hook. It goes up
when a backend that was right no longer is; methods with a default are added without."""


@dataclass(frozen=True)
class ProgramInfo:
    """One program of a compiling backend, as ``tpcore compile`` lists it."""

    digest: str
    site: str  # where in the script it is run: "train.py:20 in step"
    runs: int
    operations: int
    collectives: str  # "4 all_reduce add over 2, ..."
    parameter_bytes: int


class Backend(ABC):
    """One way to run collectives. A plugin's hook returns the class; ``tpcore.init`` makes the instance."""

    interface: ClassVar[int] = 1
    """The version of the plugin interface that the class was written for: say it in your own."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    transport_class: ClassVar[type[Transport] | None] = None
    """The class of what ``connect`` returns: one that lacks a method is named before anything starts."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this backend cannot run on this machine, or None if it can. Imports nothing heavy if it
        can be told without."""
        return None

    @classmethod
    def compile_ahead(cls, command: Sequence[str], world: int | None) -> list[ProgramInfo]:
        """The programs that ``command`` (``python train.py ...``) on ``world`` ranks needs, compiled into a
        cache where this machine has the compiler. ``world`` None: as many as the command says, or 1."""
        raise BackendError(f"{cls.__name__} compiles nothing ahead of time: run the script as it is")

    @abstractmethod
    def start(self, timeout: float) -> tuple[int, int]:
        """Join the job; return (rank, world size). ``timeout``: seconds a collective may wait."""

    @abstractmethod
    def connect(self, group: Group, rank: int) -> Transport:
        """What makes the collectives of this rank's part of ``group``. Called in the same order on every
        rank, for groups of one too."""

    def adopt(self, process_group: Any) -> Transport:
        """The same for a group object that the user made with the backend's own library."""
        raise BackendError(
            f"{type(self).__name__} cannot use the group {process_group!r}: pass a tpcore Comm"
        )

    @final
    def comm(self, group: Group, rank: int) -> Comm:
        """Collectives over ``group``, checked."""
        return self._bound(self.connect(group, rank), "connect")

    @final
    def comm_of(self, process_group: Any) -> Comm:
        """Collectives over a group object of the user's, checked."""
        return self._bound(self.adopt(process_group), "adopt")

    def _bound(self, made: Transport, by: str) -> Comm:
        if not isinstance(made, Transport):
            raise BackendError(f"{type(self).__name__}.{by}() returned {made!r}, not a tpcore Transport")
        return Comm(made, self.capabilities.sums())

    @abstractmethod
    def device(self) -> torch.device:
        """Where this rank's tensors live."""

    @classmethod
    def memory_of(cls, t: Tensor) -> object:
        """Equal for tensors that are the same memory, seen the same way: tied weights, and a weight and its
        ``detach()``. A checkpoint stores those once."""
        try:
            memory = t.untyped_storage().data_ptr()
        except RuntimeError:  # sparse, and devices that have no storage that Python may ask
            return id(t)
        view = t.device, t.dtype, t.storage_offset(), t.shape, t.stride(), t.is_conj(), t.is_neg()
        # lazy devices give no address, and empty tensors have none
        return (memory, view) if memory else id(t)

    def stop(self) -> None:
        """Leave the job."""

    def gone(self, rank: int) -> str | None:
        """How the process of ``rank`` has ended: "was killed by SIGKILL". None while it runs, and where there
        is no telling. Asked while other ranks work alone; makes no collective."""
        return None

    def mark_step(self) -> None:
        """End of a training step: a lazy backend cuts its graph here."""

    # -- traced models: what a backend that declares ``tracing`` writes -----------------------------------
    @classmethod
    def most_ranks(cls) -> int | None:
        """How many ranks this machine can hold; None if there is no telling."""
        return None

    @classmethod
    def job(cls, folder: Path) -> dict[str, str]:
        """Variables by which the processes of one job on this machine find each other, beside RANK,
        LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. ``folder`` is empty and theirs."""
        raise BackendError(f"{cls.__name__} starts no processes")

    def compile_with(self, options: CompilerOptions) -> bool:
        """Use ``options`` for what ``trace`` compiles from now on. False: this backend compiles nothing."""
        return False

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        """Write ``fn`` as one program for all ranks into ``folder``, which is empty.

        On every rank, inside ``tpcore.use``; the first writes. Weights, inputs and the rank become inputs
        of the program: no value of theirs is in it. ``dims``: the dynamic dimensions of each input.
        BackendError on all ranks if they would need different programs.
        """
        raise BackendError(f"{type(self).__name__} traces no models")

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        """What ``trace`` wrote, ready to run on this rank. ``weights`` may change in place later on.

        BackendError for files that are damaged, or that would run code of their own.
        """
        raise BackendError(f"{type(self).__name__} runs no traced models")

    def get_rng_state(self) -> Tensor:
        """State of the generator that dropout on ``device()`` draws from."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator that dropout on ``device()`` draws from."""
        torch.default_generator.manual_seed(seed)
