"""``torch.distributed.init_process_group("xla")``, on gloo where torch_xla is not installed."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

from tpcore.extras import module_spec


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _environment(url: str, **_: Any) -> Any:
    return dist.rendezvous("env://")


if module_spec("torch_xla.distributed.xla_backend"):
    import_module("torch_xla.distributed.xla_backend")
elif "xla" not in dist.Backend.backend_list:
    dist.Backend.register_backend("xla", _gloo, devices=["cpu"])
    for scheme in ("xla", "pjrt"):
        dist.register_rendezvous_handler(scheme, _environment)
