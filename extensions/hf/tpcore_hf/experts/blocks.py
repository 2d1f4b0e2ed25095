"""What experts add, in blocks that have the same bits at every degree: each as a rank of the largest degree has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpcore.comm.blocks import CommSpec, copies, total
from tpcore.layers.blocks import aligned
from tpcore.layout.shard import ShardSpec


def summed_in_blocks(layer: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The sum over all ranks of what the experts of ``layer``, or some features of each, add to ``inputs``."""
    spec: CommSpec = layer.tp, None, torch.float32
    n, parameters, outputs = layer.tp.blocks, layer._parameters, []
    floats = {name for name, t in inputs.items() if isinstance(t, Tensor) and t.is_floating_point()}
    copied = {name: copies(t, spec) if name in floats else (t,) * n for name, t in inputs.items()}
    parts = {name: _parts(p, layer.shard_specs[name], spec) for name, p in parameters.items() if p is not None}
    try:
        for i in range(n):
            vars(layer)["_parameters"] = parameters | {name: of[i] for name, of in parts.items()}
            out = _added(layer, i, {name: of[i] for name, of in copied.items()})
            # where no expert of a block is chosen, a gradient of zeros and not none
            outputs.append(out + sum(of[i].flatten()[:0].sum() for of in parts.values()))
    finally:
        vars(layer)["_parameters"] = parameters
    return total(outputs, spec)


def _added(layer: Any, block: int, inputs: dict[str, Any]) -> Tensor:
    if layer.distributed:
        n = vars(layer)["num_experts"] = layer.of_a_rank // layer.tp.blocks
        numbers, weights = inputs["top_k_index"] - block * n, inputs["top_k_weights"]
        inputs["top_k_index"], inputs["top_k_weights"] = layer.local(numbers, weights, n, layer.of_a_rank)
    out: Tensor = layer.computed(inputs, None)
    return out


def _parts(p: Tensor, cut: ShardSpec, spec: CommSpec) -> list[Tensor]:
    """For each block of this rank its part of ``p``; of a whole one, which every block adds, a share."""
    comm, n = spec[0], spec[0].blocks or 1
    if cut.dim is None:
        return [copy / (n * comm.size) for copy in copies(p, spec)]
    sizes = [block.size // comm.size for block in cut.blocks]
    of_projections = [part.chunk(n, cut.dim) for part in p.split(sizes, cut.dim)]
    blocks = zip(*of_projections, strict=True)
    return [aligned(torch.cat(parts, cut.dim) if len(parts) > 1 else parts[0]) for parts in blocks]
