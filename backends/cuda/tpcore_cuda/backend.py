"""The backend: a job over torch.distributed whose tensors are on GPUs."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpcore import settings
from tpcore.c10d.backend import C10dBackend
from tpcore.c10d.supervision.host import sockets
from tpcore.c10d.supervision.supervisor import Supervisor
from tpcore.c10d.supervision.waiting import Waiting
from tpcore.c10d.transport import C10dTransport
from tpcore.comm.transport import Transport
from tpcore.errors import BackendError
from tpcore.layout.mesh import Group
from tpcore.private import backend_of

SHARE = settings.Variable("NCCL_MULTI_RANK_GPU_ENABLE", settings.one_of({"1": True, "0": False}), False)
ON_ERROR = settings.Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", str, "2")
RETHROW = settings.Variable("TORCH_NCCL_RETHROW_CUDA_ERRORS", str, "0")

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads do not limit this one
_LOOK = 0.2  # seconds between two looks: a thousandth of the time-out by default


class Queue(threading.Thread):
    """Ends the job with a verdict if a collective is not complete ``timeout`` seconds after the one before it. A
    host that reads a value waits in the driver and cannot look itself; after the verdict the job's monitor aborts
    the communicators: the read returns, and the next collective raises the verdict. ``enter`` is called in the thread,
    before all that it asks the driver."""

    def __init__(self, timeout: float, enter: Callable[[], object] = lambda: None) -> None:
        super().__init__(name="tpcore queue", daemon=True)
        self._enter = enter
        self._timeout, self._ended = timeout, threading.Event()
        self._under_way: deque[tuple[Waiting, Callable[[], bool]]] = deque()
        # an interpreter that ends would end this thread inside a call of the driver
        atexit.register(self.close)

    def finish(self, watch: Waiting, work: Any) -> None:
        """Let the current stream wait for ``work``. Returns at once."""
        watch.finish(work)
        if torch.cuda.is_current_stream_capturing():  # nothing runs yet
            return
        # an event and not the work, which would keep its tensors alive
        event = torch.cuda.Event()
        event.record()
        self.follow(watch, event.query)

    def follow(self, watch: Waiting, done: Callable[[], bool]) -> None:
        self._under_way.append((watch, done))

    def run(self) -> None:
        self._enter()
        since = time.monotonic()
        while not self._ended.wait(_LOOK):
            try:
                while self._under_way and self._under_way[0][1]():
                    self._under_way.popleft()
                    since = time.monotonic()
            except RuntimeError:  # the device has failed: what the rank asks of it next raises the same
                return
            if not self._under_way:
                since = time.monotonic()
            elif time.monotonic() - since > self._timeout:
                self._under_way[0][0].expire()
                return

    def close(self) -> None:
        atexit.unregister(self.close)
        self._ended.set()
        self.join()
        self._under_way.clear()


class CudaBackend(C10dBackend):
    """One rank a GPU, over NCCL. The host never waits for a collective: a ``Queue`` watches them."""

    interface = 2
    transport = "nccl"
    library = (os.path.dirname(__file__) + os.sep,)
    capabilities = replace(
        C10dBackend.capabilities,
        moved=(torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
    )

    def __init__(self) -> None:
        super().__init__()
        self._queue: Queue | None = None
        self._environment = ExitStack()

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} was built without CUDA: install a build of torch for it"
        if not torch.cuda.device_count():
            return (
                f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU: nvidia-smi "
                "must list one, and CUDA_VISIBLE_DEVICES must not hide it"
            )
        return super().unavailable()

    @classmethod
    def remark(cls) -> str:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{cls._carrier()} between ranks on {', '.join(names)}"

    @classmethod
    def _carrier(cls) -> str:
        version = torch.cuda.nccl.version()
        return f"NCCL {'.'.join(map(str, version))}, one rank a GPU,"

    @classmethod
    def most_ranks(cls) -> int | None:
        return torch.cuda.device_count() or None

    def device(self) -> torch.device:
        return torch.device("cuda", settings.LOCAL_RANK.get() % torch.cuda.device_count())

    # -- the job ------------------------------------------------------------------------------------------
    def start(self, timeout: float) -> tuple[int, int]:
        # before the group: a rank that leaves the current device at 0 opens a context there, and NCCL joins with the
        # device that is current
        torch.cuda.set_device(self.device())
        unset = {v.name: v.default for v in (ON_ERROR, RETHROW) if not v.is_set}
        self._environment.enter_context(settings.changed(unset))
        if self.lazy:
            self._queue = Queue(timeout, self._enter_thread)
            self._queue.start()
        return super().start(timeout)

    def _enter_thread(self) -> None:
        """Let a thread ask for events as torch's own watch does: without a context on GPU 0, and also while another
        thread captures a CUDA graph, which its questions would end."""
        torch.cuda.set_device(self.device())
        mode = ctypes.c_int(_THREAD_LOCAL)
        # torch has loaded the library with the device
        if code := ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            raise BackendError(f"the driver refuses a thread the mode in which it may ask for events: error {code}")

    def _supervised(self, supervisor: Supervisor) -> None:
        """BackendError on all ranks if two have one GPU, which NCCL would report as an invalid usage."""
        if SHARE.get():
            return
        first: dict[str, int] = {}
        for rank, place in enumerate(supervisor.meet("tell their GPUs", self._place())):
            if first.setdefault(place, rank) != rank:
                raise BackendError(
                    f"ranks {first[place]} and {rank} are both on GPU {place}, and NCCL takes one rank a GPU: start "
                    "as many ranks on a host as it has GPUs, or set TPCORE_CUDA_TRANSPORT=gloo, or with NCCL "
                    f"2.30 or later {SHARE.name}=1"
                )

    def _place(self) -> str:
        """The GPU of this rank, by the same name in all processes."""
        properties: Any = torch.cuda.get_device_properties(self.device())
        return f"{properties.name} {properties.uuid}"

    @property
    def _seconds(self) -> timedelta:
        # torch's own watch must not end a rank before this one's verdict has named the reason
        return timedelta(seconds=(2 if self.lazy else 1) * self._timeout)

    def _made_over(self, group: Group, pg: Callable[[], Any], watch: Waiting | None) -> Transport:
        transport = super()._made_over(group, pg, watch)
        if watch is not None and self._queue is not None and isinstance(transport, C10dTransport):
            transport.finish = partial(self._queue.finish, watch)
            watch.parting(partial(self._abort, watch, pg))
        return transport

    def _abort(self, watch: Waiting, pg: Callable[[], Any]) -> None:
        """In a lost job, end the kernels that wait for other ranks: the host would wait for them, and never
        return. The job's monitor calls it; a program that ends well leaves its kernels to their end."""
        abort = getattr(backend_of(pg(), self.device()), "abort", None)
        if abort is not None and watch.lost_job is not None:
            abort()

    def _close(self, error: BaseException | None) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        super()._close(error)
        self._environment.close()

    # -- dropout draws from the GPU's generator -----------------------------------------------------------
    def _generator(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[self.device().index]

    def get_rng_state(self) -> Tensor:
        return self._generator().get_state()

    def set_rng_state(self, state: Tensor) -> None:
        self._generator().set_state(state.cpu())

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)


class CudaOverGloo(CudaBackend):
    """Any number of ranks a GPU. gloo copies through the host, and the host waits for it."""

    transport = "gloo"

    @property
    def lazy(self) -> bool:
        return False

    @classmethod
    def _carrier(cls) -> str:
        return "gloo, which copies through the host,"

    @classmethod
    def most_ranks(cls) -> int | None:
        return None

    def _supervised(self, supervisor: Supervisor) -> None:
        """Ranks may share a GPU."""

    def _sockets(self) -> frozenset[int]:
        return sockets()
