"""torch_xla by its own paths, over the current context: a script replaces ``torch_xla`` by ``tpcore_nxd.xla``.

What training scripts call is here, on any backend.
"""

from ..paths import mirror
from . import parallel_loader as parallel_loader
from . import runtime as runtime
from . import xla_backend as xla_backend
from .xla_model import mark_step as sync
from .xla_model import xla_device as device
from .xla_multiprocessing import launch

__all__ = ["device", "launch", "sync"]

mirror(__name__, *(f"xla.{name}" for name in ("core", "distributed", "utils", "experimental")))
mirror(f"{__name__}.xla_backend", "xla.distributed.xla_backend", "xla.experimental.pjrt_backend")
mirror(f"{__name__}.xla_model", "xla.core.xla_model", "xla.utils.checkpoint")
mirror(f"{__name__}.parallel_loader", "xla.distributed.parallel_loader")
mirror(f"{__name__}.xla_multiprocessing", "xla.distributed.xla_multiprocessing")
mirror("tpcore_nxd.optimizer", "xla.distributed.zero_redundancy_optimizer")
