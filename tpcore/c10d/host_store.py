"""The store of a job that this process starts. This process hosts it, so that it outlives every rank."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from .. import settings

_HOST = "127.0.0.1"


def host_store() -> tuple[Any, dict[str, str]]:
    """The store, which exists as long as it is referenced, and the environment variables for the ranks."""
    # a listening socket of our own: TCPStore would listen on all interfaces, whatever its host is
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, {
        settings.MASTER_ADDR.name: _HOST,
        settings.MASTER_PORT.name: str(store.port),
        settings.AGENT_STORE.name: "True",
    }
