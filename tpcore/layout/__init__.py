"""Which rank holds which slice: pure arithmetic, without torch.distributed."""

from .layout import Layout
from .mesh import Group, Mesh
from .shard import Block, ShardSpec, divide

__all__ = ["Block", "Group", "Layout", "Mesh", "ShardSpec", "divide"]
