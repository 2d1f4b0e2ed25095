"""The ``Trainer`` of transformers on tpcore's mesh; needs ``pip install 'tpcore[trainer]'``."""

from ...errors import extra

with extra("trainer", __name__):
    from .trainer import Trainer

__all__ = ["Trainer"]
