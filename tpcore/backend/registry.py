"""The installed plugins: how backends and extensions are found, and whether a backend fits this tpcore and this job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from ..comm.observer import Observer, Observers
from ..errors import BackendError, counted
from ..layout.mesh import Mesh
from ..log import log
from .interface import INTERFACE, PROJECT, Backend, hookspec


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
    reason: str  # why it is not usable; empty if it is
    capabilities: dict[str, Any] = field(default_factory=dict)  # as JSON; empty if the plugin is broken
    remark: str = ""  # what carries the collectives on this machine, where there is a choice


def _entry_points(name: str | None = None) -> list[EntryPoint]:
    points = entry_points(group=PROJECT) if name is None else entry_points(group=PROJECT, name=name)
    return sorted(set(points), key=lambda ep: ep.name)


def _origin(ep: EntryPoint) -> tuple[str, str]:
    return (ep.dist.name, ep.dist.version) if ep.dist else ("unknown distribution", "?")


def _named(ep: EntryPoint) -> str:
    return f"backend {ep.name!r} of {' '.join(_origin(ep))}"


def _load(ep: EntryPoint) -> type[Backend]:
    where = _named(ep)
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(Specs)
    try:
        plugins.register(ep.load())
        plugins.check_pending()
        cls = plugins.hook.tpcore_backend()
    except (Exception, SystemExit) as e:  # a module that calls sys.exit must not end the listing
        raise BackendError(f"{where} cannot be loaded: {type(e).__name__}: {e}") from e
    if not plugins.hook.tpcore_backend.get_hookimpls():
        raise BackendError(
            f"{where}: {ep.value} has no hook: define tpcore_backend() there, decorated with tpcore.backend.hookimpl"
        )
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise BackendError(f"{where}: its tpcore_backend hook returned {cls!r}, not a Backend class")
    if why := unfit(cls):
        raise BackendError(f"{where}: {why}")
    cls._plugin = where
    return cls


def unfit(cls: type[Backend]) -> str | None:
    """Why this class cannot be a backend of this tpcore, on any machine."""
    if cls.interface != INTERFACE:
        return (
            f"it was written for version {cls.interface} of the plugin interface and this tpcore has version "
            f"{INTERFACE}: install releases of the two that fit"
        )
    for part in (cls, cls.transport_class):
        missing = sorted(getattr(part, "__abstractmethods__", ()))
        if part is not None and missing:
            return f"{part.__name__} lacks {', '.join(missing)}"
    return cls.capabilities.lack()


def backend_class(name: str) -> type[Backend]:
    """Import only the plugin called ``name``: the others may be slow to import, as torch_xla is."""
    points = _entry_points(name)
    if not points:
        installed = sorted({ep.name for ep in _entry_points()})
        raise BackendError(f"no backend {name!r} is installed; there are {installed}")
    if len(points) > 1:
        owners = sorted(" ".join(_origin(ep)) for ep in points)
        raise BackendError(f"backend {name!r} is provided by several distributions: {owners}; uninstall all but one")
    return _load(points[0])


def load_backend(name: str) -> Backend:
    """An instance of the backend called ``name``. BackendError with the reason if it cannot run here."""
    cls = backend_class(name)
    try:
        why = cls.unavailable()
    except Exception as e:
        raise BackendError(f"backend {name!r} cannot tell if it can run: {type(e).__name__}: {e}") from e
    if why is not None:
        raise BackendError(f"backend {name!r} cannot run here: {why}")
    return cls()


def check_fits(backend: Backend, mesh: Mesh) -> None:
    """Raise an error if ``backend``, by its declared capabilities, cannot run a job on ``mesh``."""
    name = type(backend).__name__
    if why := unfit(type(backend)):
        raise BackendError(f"{name}: {why}")
    if misfit := backend.capabilities.misfit({**mesh.axes, "world": mesh.size}):
        raise ValueError(f"{name} cannot form {misfit}; this job is {dict(mesh.axes)}")


def check_held(name: str, ranks: int, option: str) -> None:
    """ValueError, which names ``option``, where this machine has no place for so many ranks of a backend."""
    most = backend_class(name).most_ranks()
    if most is not None and ranks > most:
        raise ValueError(f"{option}={ranks}: this machine can hold {counted(most, 'rank')} of backend {name!r}")


def backends() -> list[BackendInfo]:
    """All installed plugins. A broken plugin is listed with its error and does not hide the others."""
    out = []
    for ep in _entry_points():
        capabilities, remark = dict[str, Any](), ""
        try:
            cls = _load(ep)
            capabilities, reason = cls.capabilities.to_json(), cls.unavailable() or ""
            remark = "" if reason else cls.remark()
        except Exception as e:  # noqa: BLE001  a plugin's hook or probe may fail in any way
            reason = str(e) if isinstance(e, BackendError) else f"{type(e).__name__}: {e}"
        out.append(BackendInfo(ep.name, *_origin(ep), ep.value, not reason, reason, capabilities, remark))
    return out


GROUP = f"{PROJECT}.extensions"


class ExtensionSpecs:
    """What an extension may add. Its entry point is a module with some of these, each decorated by ``hookimpl``; the
    module is imported in every program that asks for a name, so it imports the rest of the extension in its hooks."""

    @hookspec
    def tpcore_names(self) -> Mapping[str, str] | None:
        """Names of ``tpcore``, each with the module that has it and is imported when a program asks for the name."""

    @hookspec
    def tpcore_checkpoint_forms(self) -> Iterable[Any] | None:
        """Forms of checkpoint, each a ``tpcore.checkpoint.forms.source.Form``, tried after tpcore's own form."""

    @hookspec
    def tpcore_guards(self) -> Iterable[Any] | None:
        """Each a ``tpcore.runtime.guards.Guard``, installed by ``init`` and undone by ``shutdown``."""

    @hookspec
    def tpcore_observer(self, ctx: Any, certain: bool) -> Observer | None:
        """What looks on in the checked run of ``ctx``, a ``ParallelContext`` without groups as yet. ``certain``: in any
        run, on one layer that a plan of the user's own leaves in parts; it reports what is certainly wrong alone."""

    @hookspec
    def tpcore_commands(self, app: Any) -> None:
        """Add commands to ``app``, the ``typer.Typer`` of ``tpcore``."""


@cache
def manager() -> pluggy.PluginManager:
    """All extensions. One that cannot be loaded is left out, with a warning that names it."""
    found = pluggy.PluginManager(PROJECT)
    found.add_hookspecs(ExtensionSpecs)
    for point in sorted(set(entry_points(group=GROUP)), key=lambda point: point.name):
        try:
            found.register(point.load(), name=point.name)
            found.check_pending()
        except Exception as e:  # noqa: BLE001  a module of somebody else may raise anything
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
            log.warning(f"the extension {point.name!r} of {owner} is left out: {type(e).__name__}: {e}")
            if found.has_plugin(point.name):
                found.unregister(name=point.name)
    return found


@cache
def names() -> Mapping[str, str]:
    """The module of each name that an extension adds. ValueError for a name of two extensions."""
    found: dict[str, str] = {}
    for added in manager().hook.tpcore_names():
        for name, module in added.items():
            if found.setdefault(name, module) != module:
                raise ValueError(f"tpcore.{name} is added by {found[name]} and by {module}: uninstall one of them")
    return found


def observer_of(ctx: Any, *, certain: bool = False) -> Observer | None:
    """The observers of all extensions; None if they have none."""
    found = [o for o in manager().hook.tpcore_observer(ctx=ctx, certain=certain) if o is not None]
    return found[0] if len(found) == 1 else Observers(*found) if found else None
