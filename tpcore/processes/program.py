"""The program that this process runs, as its functions see it, and another process that stands in for it."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_FLAGS = {
    "debug": "d",
    "dont_write_bytecode": "B",
    "no_site": "S",
    "verbose": "v",
    "bytes_warning": "b",
    "quiet": "q",
    "optimize": "O",
    "isolated": "I",
    "ignore_environment": "E",
    "no_user_site": "s",
    "safe_path": "P",
}


def interpreter() -> list[str]:
    """The command of an interpreter with the options of this one."""
    flags = [f"-{option * int(getattr(sys.flags, name, 0))}" for name, option in _FLAGS.items()]
    unbuffered = isinstance(getattr(sys.__stdout__, "buffer", None), io.RawIOBase)  # in no flag
    others = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    warnings = [f"-W{action}" for action in sys.warnoptions]
    return [sys.executable, *(f for f in flags if f != "-"), *["-u"] * unbuffered, *others, *warnings]


class ThisProgram:
    """In a pickle: makes the process that reads it one of this program. The value there is its script's namespace."""

    def __reduce__(self) -> tuple[Any, ...]:
        main = sys.modules["__main__"]
        names = ("__name__", "__doc__", "__file__", "__package__")
        script: dict[str, Any] = {name: vars(main)[name] for name in names if name in vars(main)}
        if spec := getattr(main, "__spec__", None):  # of python -m
            script["__spec__"] = ModuleSpec(spec.name, None, origin=spec.origin)  # not every loader can be pickled
        method = multiprocessing.get_start_method(allow_none=True)
        return _enter, (sys.path, sys.argv, script, method, bytes(multiprocessing.current_process().authkey))


def _enter(path: list[str], argv: list[str], script: dict[str, Any], method: str | None, key: bytes) -> dict[str, Any]:
    sys.path[:], sys.argv[:] = path, argv
    main = ModuleType("__main__")
    vars(main).update(script)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # its name in workers of multiprocessing
    if method is not None:
        multiprocessing.set_start_method(method, force=True)
    multiprocessing.current_process().authkey = key
    return vars(main)


def dumps(call: Any, cloudpickle: Any) -> bytes:
    """Pickle the program and ``call``. With cloudpickle, of the script's classes and functions those that it refers to:
    they share a namespace as they do here, in which a pickle by name finds them."""
    if cloudpickle is None:
        return pickle.dumps((ThisProgram(), call, []))
    main, program, found, out = sys.modules["__main__"], ThisProgram(), list[Any](), io.BytesIO()
    if main.__name__ != "__main__":  # in a worker of multiprocessing
        cloudpickle.register_pickle_by_value(main)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | FunctionType) and vars(main).get(obj.__qualname__) is obj:
                found.append(obj)
            return super().reducer_override(obj)

    pickler = Pickler(out)
    pickler.globals_ref[id(vars(main))] = program  # what functions of the script are given as their globals
    pickler.dump((program, call, found))  # in this order: the process first, and the list when it is complete
    return out.getvalue()


def loads(data: bytes) -> Any:
    """The call that ``dumps`` pickled. This process is one of its program from now on."""
    script, call, found = pickle.loads(data)
    script.update({obj.__qualname__: obj for obj in found})
    return call
