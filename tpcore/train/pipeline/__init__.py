"""Pipeline parallelism: one program for all ranks, a stage is data."""

from .layers import PipelinedLayers
from .model import PipelineModel, pipelined_layers
from .schedule import Schedule

__all__ = ["PipelineModel", "PipelinedLayers", "Schedule", "pipelined_layers"]
