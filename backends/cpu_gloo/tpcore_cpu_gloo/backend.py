"""Joining a job over torch.distributed, with gloo for transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tpcore.backend.programs import Dims, Function, LoadedProgram, comm_named, program_comms
from tpcore.c10d.backend import C10dBackend
from tpcore.c10d.supervision.host import RANK_MEMORY, available_memory, sockets
from tpcore.context import current
from tpcore.settings import changed

from .gloo import GlooTransport
from .settings import INTERFACE


class GlooBackend(C10dBackend):
    """Ranks are processes of CPUs. What they say about lost and disagreeing ranks is ``C10dBackend``'s."""

    transport = "gloo"
    transport_class = GlooTransport
    library = (os.path.dirname(__file__) + os.sep,)
    capabilities = replace(
        C10dBackend.capabilities,
        moved=(torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn),
        tracing=torch.__version__ >= "2.9",  # the oldest torch.export that this was tested with
    )

    def device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def most_ranks(cls) -> int | None:
        memory = available_memory()
        return None if memory is None else max(1, memory // RANK_MEMORY)

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        from . import programs  # torch.export takes a second to import

        ctx = current()
        programs.trace(fn, weights, inputs, dims, program_comms(ctx), ctx.world, folder)

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        from . import programs

        return programs.load(folder, weights, partial(comm_named, current()))

    def _sockets(self) -> frozenset[int]:
        return sockets()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A group of one needs no port that others can reach, and gloo opens one."""
        local = [i for _, i in socket.if_nameindex() if i in ("lo", "lo0")]
        with changed({INTERFACE.name: local[0]} if local and not INTERFACE.is_set else {}):
            yield
