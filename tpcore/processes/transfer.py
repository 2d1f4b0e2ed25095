"""What passes between processes: pickled functions, results and errors, files in memory, and tensors there."""

from __future__ import annotations

import fcntl
import io
import mmap
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CollectiveTimeoutError, PeerLostError, described

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


MemoryPlace = tuple[int, torch.dtype, tuple[int, ...]]
"""A tensor in a buffer: offset in bytes, dtype, shape."""
_ALIGNED = 64
_INCOMPLETE, _COMPLETE = b"\0", b"\1"


class RankTraceback(Exception):
    """The traceback text of an error from another process, attached to that error as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Outcome(NamedTuple):
    """How a function ended on one rank."""

    value: Any = None
    error: BaseException | None = None
    at: float = 0.0  # wall clock at the end, to find the first of several errors


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call(), at=time.time())
    except BaseException as e:  # noqa: BLE001  passed to the calling process
        return Outcome(error=e, at=time.time())


def root_cause(outcomes: Sequence[Outcome]) -> BaseException | None:
    """The earliest error that is not the consequence of another rank's."""
    failed = [o for o in outcomes if o.error is not None]
    failed.sort(key=lambda o: (isinstance(o.error, (PeerLostError, CollectiveTimeoutError)), o.at))
    return failed[0].error if failed else None


def _pickler() -> Any:
    """cloudpickle, which pickles closures and classes of __main__ by value; pickle if it is not installed."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call together with the program that makes it. ValueError if it cannot be pickled."""
    pickler = _pickler()
    hint = "" if pickler is not pickle else ": pip install cloudpickle, or define it in a module"
    if pickler is pickle and getattr(fn, "__module__", None) == "__main__":
        raise ValueError(f"{fn!r} of __main__ cannot be imported by other processes{hint}")
    try:
        return dumps((fn, args, kwargs), None if pickler is pickle else pickler)
    except Exception as e:
        problem = f"{fn!r} or its arguments cannot be sent to other processes"
        raise ValueError(f"{problem} ({type(e).__name__}: {e}){hint}") from e


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    fn, args, kwargs = loads(data)
    return fn, args, kwargs


def pack_outcome(outcome: Outcome, rank: int) -> bytes:
    """Pickle an outcome. A stand-in error replaces a value or an error that cannot be pickled."""
    error = outcome.error
    text = "" if error is None else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        data = _pickler().dumps(outcome)
        pickle.loads(data)
    except Exception as e:  # noqa: BLE001  whatever a user's object raises when it is pickled
        stand_in: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        if error is None:
            problem = f"the result of rank {rank} cannot be sent to the caller"
            stand_in = ValueError(f"{problem} ({type(e).__name__}: {e})")
        data = pickle.dumps(Outcome(None, stand_in, outcome.at))
    return pickle.dumps((rank, text, data))


def unpack_outcome(packed: bytes) -> Outcome:
    rank, text, data = pickle.loads(packed)
    outcome: Outcome = pickle.loads(data)
    if outcome.error is not None:
        outcome.error.__cause__ = RankTraceback(f"rank {rank}:\n{text}".rstrip())
    return outcome


def death(rank: int, code: int) -> PeerLostError:
    """The error for a rank that left no outcome. ``code``: its exit code, as subprocess returns it."""
    return PeerLostError(f"rank {rank} {described(code)}")


class SharedBuffer:
    """Shared memory behind a file descriptor without a name: freed when the last holder closes it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = nameless_file() if fd is None else fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def put(self, tensors: Sequence[Tensor]) -> tuple[MemoryPlace, ...]:
        """Copy tensors to the memory, which grows if necessary, from offset 0. Returns their places."""
        places, end = list[MemoryPlace](), 0
        for t in tensors:
            places.append((end, t.dtype, tuple(t.shape)))
            end += -(-t.nbytes // _ALIGNED) * _ALIGNED
        if end > self._bytes.numel():
            os.ftruncate(self.fd, end)
        for view, t in zip(self.get(places), tensors, strict=True):
            view.copy_(t.detach() if t.requires_grad else t)  # else the memory keeps the autograd graph alive
        return tuple(places)

    def get(self, places: Sequence[MemoryPlace]) -> list[Tensor]:
        """Tensors that are views of the memory at ``places``."""
        return [self._view(*place) for place in places]

    def _view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if offset + size > self._bytes.numel():
            # earlier views keep the smaller map alive; both maps show the same memory
            mapped = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            with torch.inference_mode(False):
                self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            return self._bytes[offset : offset + size].view(dtype).view(shape)

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def write_file(fd: int, data: bytes) -> None:
    """Write the contents of a file. ``read_file`` returns nothing until they are complete. Longer ones from before
    leave their end behind them, which a pickle does not read."""
    os.lseek(fd, 0, os.SEEK_SET)
    rest = memoryview(_INCOMPLETE + data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.pwrite(fd, _COMPLETE, 0)


def read_file(fd: int) -> bytes:
    """The bytes that ``write_file`` wrote, in any process. Empty if it did not complete."""
    size, parts, offset = os.fstat(fd).st_size, [], 1
    if os.pread(fd, 1, 0) != _COMPLETE:
        return b""
    while offset < size:  # one call reads at most 2 GB
        parts.append(os.pread(fd, size - offset, offset))
        offset += len(parts[-1])
    return b"".join(parts)


def nameless_file() -> int:
    """A file descriptor of anonymous memory, which is freed when the last descriptor is closed. Other users
    cannot open it, and nobody can make it shorter: to read behind the end would kill a process."""
    if not hasattr(os, "memfd_create"):  # a Python for an older glibc
        with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as f:
            return os.dup(f.fileno())
    # not in /dev/shm, which containers make small
    fd = os.memfd_create("tpcore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd
