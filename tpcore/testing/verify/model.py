"""``tpcore verify --model``: a tiny copy of a model, sharded, beside the whole."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from ...models.api import parallelize
from ...runtime.context import ParallelContext
from ...runtime.init import init, shutdown
from ..twin import compare
from .tiny import inputs_of, tiny_model

TOLERANCE = 1e-5  # norms and routers of transformers round to float32, whose step is 1e-7, and layers stand above them


@dataclass
class ModelVerdict:
    """What came of a model. ``wrong``: what differs first; ``refused``: why it was not sharded at all."""

    lines: list[str]
    wrong: str | None = None
    refused: str | None = None


def verify_model(backend: str | None, tp: int, folder: str, options: dict[str, Any]) -> ModelVerdict:
    """Start this rank, and compare a tiny copy of the model in ``folder``, sharded with ``options``, with the whole."""
    torch.set_num_threads(1)
    ctx = init(backend, tp=tp)
    try:
        return compared(ctx, folder, options)
    except ValueError as e:
        return ModelVerdict([], refused=str(e))
    finally:
        shutdown()


def compared(ctx: ParallelContext, folder: str, options: dict[str, Any]) -> ModelVerdict:
    """Of the tp ranks of ``ctx``. ValueError for a model that is refused, or of which no tiny copy is known."""
    tp = ctx.comm("tp").size
    whole = tiny_model(folder, tp)
    inputs = inputs_of(whole, tp)
    model = parallelize(deepcopy(whole), **options)
    total, mine = (sum(p.numel() for p in m.parameters()) for m in (whole, model))
    lines = [
        f"a tiny copy of {type(whole).__name__} ({whole.config.model_type}): {total:,} parameters in float64, "
        f"of which a rank of tp={tp} holds {mine / total:.0%}"
    ]
    moved = {name: x.to(ctx.backend.device()) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    try:
        compare(model.to(ctx.backend.device()), whole.to(ctx.backend.device()), moved, tolerance=TOLERANCE)
    except AssertionError as e:
        return ModelVerdict(lines, wrong=str(e))
    named = dict(whole.named_parameters())
    without = [name for name, p in named.items() if p.grad is None]
    lines.append(
        f"output, loss and {len(named) - len(without)} gradients are the whole model's, to {TOLERANCE:.0e} of the "
        "largest value of each"
    )
    if without:
        lines.append(f"not compared, for text gives them no gradient: {', '.join(without[:3])}, {len(without)} in all")
    return ModelVerdict(lines)
