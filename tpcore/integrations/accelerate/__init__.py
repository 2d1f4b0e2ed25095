"""accelerate's ``Accelerator`` on tpcore's mesh. Importing this needs ``pip install 'tpcore[trainer]'``."""

from .accelerator import Accelerator

__all__ = ["Accelerator"]
