"""Pipeline parallelism with one program for all ranks: the stage number is data."""

from .alike import find_layers
from .layers import PipelinedLayers
from .model import PipelineModel, pipelined_layers
from .schedule import Schedule

__all__ = ["PipelineModel", "PipelinedLayers", "Schedule", "find_layers", "pipelined_layers"]
