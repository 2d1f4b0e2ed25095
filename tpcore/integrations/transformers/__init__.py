"""The ``Trainer`` of transformers on tpcore's mesh; needs ``pip install 'tpcore[trainer]'``."""

from .trainer import Trainer

__all__ = ["Trainer"]
