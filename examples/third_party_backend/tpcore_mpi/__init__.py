"""The plugin: one hook. Nothing of MPI is imported until somebody asks for the backend."""

from __future__ import annotations

from tpcore.backend import Backend, hookimpl

from .backend import MPIBackend


@hookimpl
def tpcore_backend() -> type[Backend]:
    return MPIBackend
