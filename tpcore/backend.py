"""What a plugin provides, and how it is found."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

import pluggy
import torch
from torch import Tensor

from .capabilities import Capabilities
from .comm import Comm
from .errors import BackendError
from .mesh import Group, Mesh
from .program import Dims, Function, Program

PROJECT = "tpcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

INTERFACE = 1
"""Version of the plugin interface: of ``Backend``, ``Comm``, ``Capabilities`` and the hook. It goes up when
a backend that was right no longer is; methods with a default are added without."""


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
    comm_class: ClassVar[type[Comm] | None] = None
    """The class of what ``comm`` returns: one that lacks a method is then named before anything starts."""

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
    def comm(self, group: Group, rank: int) -> Comm:
        """Collectives over ``group``. Called in the same order on every rank."""

    def comm_of(self, process_group: Any) -> Comm:
        """Collectives over a group object that the user made with the backend's own library."""
        raise BackendError(
            f"{type(self).__name__} cannot use the group {process_group!r}: pass a tpcore Comm"
        )

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

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        """Write ``fn`` as one program for all ranks into ``folder``, which is empty.

        On every rank, inside ``tpcore.use``; the first writes. Weights, inputs and the rank become inputs
        of the program: no value of theirs is in it. ``dims``: the dynamic dimensions of each input.
        BackendError on all ranks if they would need different programs.
        """
        raise BackendError(f"{type(self).__name__} traces no models")

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> Program:
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


class Specs:
    """The plugin interface: one hook."""

    @hookspec(firstresult=True)
    def tpcore_backend(self) -> type[Backend] | None:
        """Return the Backend class this plugin provides."""


@dataclass(frozen=True)
class BackendInfo:
    """One installed plugin, as ``tpcore backends`` lists it."""

    name: str
    distribution: str
    version: str
    module: str
    usable: bool
    reason: str  # why not usable; empty if it is
    capabilities: dict[str, Any] = field(default_factory=dict)  # as JSON has them; empty if it is broken


def _entry_points(name: str | None = None) -> list[EntryPoint]:
    found = entry_points(group=PROJECT) if name is None else entry_points(group=PROJECT, name=name)
    return sorted(set(found), key=lambda ep: ep.name)


def _origin(ep: EntryPoint) -> tuple[str, str]:
    return (ep.dist.name, ep.dist.version) if ep.dist else ("unknown distribution", "?")


def _load(ep: EntryPoint) -> type[Backend]:
    where = f"backend {ep.name!r} of {' '.join(_origin(ep))}"
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    try:
        manager.register(ep.load())
        manager.check_pending()
        hooked = manager.hook.tpcore_backend.get_hookimpls()
        cls = manager.hook.tpcore_backend()
    except (Exception, SystemExit) as e:  # a module that ends the program must not end the listing either
        raise BackendError(f"{where} cannot be loaded: {type(e).__name__}: {e}") from e
    if not hooked:
        raise BackendError(
            f"{where}: {ep.value} has no hook: define tpcore_backend() there, decorated with tpcore.hookimpl"
        )
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise BackendError(f"{where}: its tpcore_backend hook returned {cls!r}, not a Backend class")
    why = _unfit(cls)
    if why is not None:
        raise BackendError(f"{where}: {why}")
    return cls


def _unfit(cls: type[Backend]) -> str | None:
    """Why this class cannot be a backend of this tpcore, on any machine."""
    if cls.interface != INTERFACE:
        return (
            f"it was written for version {cls.interface} of the plugin interface and this tpcore has version "
            f"{INTERFACE}: install releases of the two that fit"
        )
    for part in (cls, cls.comm_class):
        missing = sorted(getattr(part, "__abstractmethods__", ()))
        if part is not None and missing:
            return f"{part.__name__} lacks {', '.join(missing)}"
    return cls.capabilities.lack()


def backend_class(name: str) -> type[Backend]:
    """Import only the plugin called ``name``, so that nobody pays for torch_xla unasked."""
    found = _entry_points(name)
    if not found:
        installed = sorted({ep.name for ep in _entry_points()})
        raise BackendError(f"no backend {name!r} is installed; there are {installed}")
    if len(found) > 1:
        owners = sorted(" ".join(_origin(ep)) for ep in found)
        raise BackendError(
            f"backend {name!r} is provided by several distributions: {owners}; uninstall all but one"
        )
    return _load(found[0])


def load_backend(name: str) -> Backend:
    """An instance of the backend called ``name``, or BackendError saying why it cannot run here."""
    cls = backend_class(name)
    try:
        why = cls.unavailable()
    except Exception as e:
        raise BackendError(f"backend {name!r} cannot tell if it can run: {type(e).__name__}: {e}") from e
    if why is not None:
        raise BackendError(f"backend {name!r} cannot run here: {why}")
    return cls()


def check_fits(backend: Backend, mesh: Mesh) -> None:
    """Raise what ``backend`` cannot do for a job on ``mesh``, from what it declares."""
    name = type(backend).__name__
    why = _unfit(type(backend))
    if why is not None:
        raise BackendError(f"{name}: {why}")
    misfit = backend.capabilities.misfit({**mesh.axes, "world": mesh.size})
    if misfit is not None:
        raise ValueError(f"{name} cannot form {misfit}; this job is {dict(mesh.axes)}")


def check_comm(backend: Backend, made: Callable[[], Any]) -> None:
    """Raise if what ``made`` gives, a Comm of ``backend``, is none, or is of a class that lacks a method."""
    try:
        comm = made()
    except TypeError as e:
        if "abstract" not in str(e):
            raise
        raise BackendError(f"{_named(backend)}: its comm() makes an unfinished Comm: {e}") from e
    if not isinstance(comm, Comm):
        raise BackendError(f"{_named(backend)}: its comm() returned {comm!r}, not a tpcore Comm")


def _named(backend: Backend) -> str:
    """The backend and the distribution that it is from, if a plugin provides it."""
    package = type(backend).__module__.partition(".")[0]
    for ep in _entry_points():
        if ep.value.partition(":")[0].partition(".")[0] == package:
            return f"backend {ep.name!r} of {' '.join(_origin(ep))}"
    return type(backend).__name__


def backends() -> list[BackendInfo]:
    """Every installed plugin; one that is broken is listed with its error and hides no other."""
    out = []
    for ep in _entry_points():
        can: dict[str, Any] = {}
        try:
            cls = _load(ep)
            can = cls.capabilities.to_json()
            reason = cls.unavailable() or ""
        except BackendError as e:
            reason = str(e)
        except Exception as e:  # noqa: BLE001  a plugin's hook or probe may fail in any way; list the others
            reason = f"{type(e).__name__}: {e}"
        out.append(BackendInfo(ep.name, *_origin(ep), ep.value, not reason, reason, can))
    return out


def say(message: str) -> None:
    """A line for the person who started the job."""
    sys.stderr.write(f"tpcore: {message}\n")
