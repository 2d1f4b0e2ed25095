"""The store of a job that this process starts, hosted here so that it outlives every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .. import settings

_HOST = "127.0.0.1"


def host_store() -> tuple[Any, dict[str, str]]:
    """The store, which lives as long as somebody has it, and the variables by which ranks find it."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    return store, {
        settings.MASTER_ADDR.name: _HOST,
        settings.MASTER_PORT.name: str(store.port),
        settings.AGENT_STORE.name: "True",
    }
