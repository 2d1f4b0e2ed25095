"""The extensions that are installed beside the core, and what they add to it by hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import pluggy

from ..comm.observer import Observer, Observers
from ..log import log
from .interface import PROJECT, hookspec

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
