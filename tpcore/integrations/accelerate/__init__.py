"""accelerate's ``Accelerator`` on tpcore's mesh. Importing this needs ``pip install 'tpcore[trainer]'``."""

from ...errors import extra

with extra("trainer", __name__):
    from .accelerator import Accelerator

__all__ = ["Accelerator"]
