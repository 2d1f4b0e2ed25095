"""Traced programs on AWS's native PyTorch: graphs of torch.export, which ``torch.compile`` takes at loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from tpcore.backend.interface import Function, LoadedProgram
from tpcore.runtime.context import ParallelContext
from tpcore.trace import programs
from tpcore.trace.graph import from_json


def trace(
    fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], ctx: ParallelContext, folder: Path
) -> None:
    """Write the program of ``fn``, exported on the CPU: a graph is the same there, and opens no core."""
    held, given = {name: t.cpu() for name, t in weights.items()}, [t.cpu() for t in inputs]
    programs.trace(fn, held, given, [{}] * len(given), ctx.comms, ctx.world, folder)


def load(folder: Path, weights: Mapping[str, Tensor], ctx: ParallelContext) -> LoadedProgram:
    """Load the program in ``folder``; its first call compiles it, or finds it in the cache of compiled programs."""
    with programs.reading(folder) as program:
        module = from_json(program, programs.collectives(ctx.named, program["groups"]))
        _move(module, ctx.device)
        constants = {name: t.to(ctx.device) for name, t in load_file(folder / programs.CONSTANTS).items()}
        run = torch.compile(module, backend="neuron", fullgraph=True, dynamic=False)
        return programs.bound(module, program, constants, weights, ctx.named, run)


def _move(module: GraphModule, device: torch.device) -> None:
    """Let tensors that the graph makes be made on ``device``."""

    def there(x: Any) -> Any:
        return device if isinstance(x, torch.device) else x

    for graph in (inner for inner in module.modules() if isinstance(inner, GraphModule)):
        for node in graph.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), there)
        graph.recompile()
