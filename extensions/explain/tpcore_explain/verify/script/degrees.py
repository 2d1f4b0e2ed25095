"""One process runs what was written for several: wherever a script says into how many ranks a job is divided, it is 1.

A library has a row in ``_PLACES`` for each function that divides, or is the configuration of one that does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Change = Callable[[Any], Any]


def _ones(function: Any) -> Any:
    """``function`` whose arguments of sizes and degrees, those with a whole number or several, are 1."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name.rstrip("_").endswith(("size", "length")) and type(value) is int:
                bound.arguments[name] = 1
            elif name == "mesh_shape":
                bound.arguments[name] = (1,) * len(value)
        return function(*bound.args, **bound.kwargs)

    return call


def _whole(function: Any) -> Any:
    """``mesh_of`` with every degree 1."""

    @wraps(function)
    def call(tp: int, pp: int, ep: int, cp: int, world: int) -> Any:
        return function(1, 1, 1, 1, world)

    return call


def _undivided(function: Any) -> Any:
    """``__post_init__`` of a configuration whose fields say into how many ranks a model is divided."""

    @wraps(function)
    def call(self: Any) -> None:
        for name, value in vars(self).items():
            if name.endswith("parallel_size") and isinstance(value, int):
                setattr(self, name, 1)
        self.sequence_parallel = False  # of ranks of a tensor-parallel group
        function(self)

    return call


def _in_place(function: Any) -> Any:
    """``launch`` within a rank: this is one of those that it would start."""

    @wraps(function)
    def call(fn: Any, nprocs: int = 2, *, args: Any = (), kwargs: Any = None, **others: Any) -> list[Any]:
        return [fn(*args, **(kwargs or {}))] * nprocs

    return call


_MESH = ("torch.distributed.device_mesh", "torch.distributed", "torch.distributed.tensor")
_PLACES: dict[str, Sequence[tuple[str, Change]]] = {
    "tpcore.runtime.init": (("mesh_of", _whole),),
    **dict.fromkeys(_MESH, (("init_device_mesh", _ones),)),
    "megatron.core.parallel_state": (("initialize_model_parallel", _ones),),
    "megatron.core.model_parallel_config": (("ModelParallelConfig.__post_init__", _undivided),),
    "fairscale.nn.model_parallel.initialize": (("initialize_model_parallel", _ones),),
}
_LAUNCH: dict[str, Sequence[tuple[str, Change]]] = {"tpcore.processes.launch": (("launch", _in_place),)}


@contextmanager
def one_of_each(alone: bool) -> Iterator[None]:
    """Inside the block a script that starts ranks itself runs in this one; ``alone``: and no job is divided."""
    places = _LAUNCH | (_PLACES if alone else {})
    with ExitStack() as stack:
        for name in places.keys() & sys.modules.keys():
            for undo in _changed(sys.modules[name], places[name]):
                stack.callback(undo)
        finder = _AfterImport(places)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _changed(module: ModuleType, places: Sequence[tuple[str, Change]]) -> Iterator[Callable[[], None]]:
    for path, change in places:
        *owners, name = path.split(".")
        holder: Any = module
        for owner in owners:
            holder = getattr(holder, owner, None)
        if (before := getattr(holder, name, None)) is not None:
            setattr(holder, name, change(before))
            yield partial(setattr, holder, name, before)


class _AfterImport(MetaPathFinder):
    """Changes modules of ``places`` that are imported from now on."""

    def __init__(self, places: dict[str, Sequence[tuple[str, Change]]]) -> None:
        self._places = places

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in self._places else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self._places[fullname])
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader, places: Sequence[tuple[str, Change]]) -> None:
        self._loader, self._places = loader, places

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        list(_changed(module, self._places))
