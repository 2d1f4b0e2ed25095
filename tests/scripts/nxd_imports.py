"""``import neuronx_distributed.a.b`` gives ``tpcore_nxd.a.b``, the same module, as after a changed import."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

OLD, NEW = "neuronx_distributed", "tpcore_nxd"


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self._own: dict[str, Any] = {}  # the spec of each module under its own name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != OLD:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = importlib.import_module(NEW + spec.name.removeprefix(OLD))
        self._own[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has put the old name's spec into the module, and relative imports compare it
        module.__spec__ = self._own[module.__name__]
        sys.modules[OLD + module.__name__.removeprefix(NEW)] = module


def installed() -> None:
    if not any(isinstance(finder, Renamed) for finder in sys.meta_path):
        sys.meta_path.insert(0, Renamed())
