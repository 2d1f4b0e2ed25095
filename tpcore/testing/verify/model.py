"""``tpcore verify --model``: a tiny copy of a model, sharded, beside the whole."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.comm import Comm
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


def verify_model(backend: str | None, tp: int, folder: str, options: dict[str, Any], ep: int = 1) -> ModelVerdict:
    """Start this rank, and compare a tiny copy of the model in ``folder``, sharded with ``options``, with the whole."""
    torch.set_num_threads(1)
    ctx = init(backend, tp=tp, ep=ep)
    try:
        return compared(ctx, folder, options)
    except ValueError as e:
        return ModelVerdict([], refused=str(e))
    finally:
        shutdown()


def compared(ctx: ParallelContext, folder: str, options: dict[str, Any]) -> ModelVerdict:
    """Of the ranks of ``ctx``. ValueError for a model that is refused, or of which no tiny copy is known."""
    tp, ep = ctx.comm("tp").size, ctx.over_axis("ep")
    ranks = 1 if ep is None else ep.size
    whole = tiny_model(folder, tp)
    inputs = inputs_of(whole, tp, ranks)
    model = parallelize(deepcopy(whole), **options)
    if ep is not None:
        if "labels" not in inputs:
            raise ValueError(f"{type(whole).__name__} has no loss of labels, of which ep={ranks} ranks take the mean")
        _by_examples(whole, ranks)
        _of_rank(model, ep, ctx.index(ctx.batch))
    total, mine = (sum(p.numel() for p in m.parameters()) for m in (whole, model))
    lines = [
        f"a tiny copy of {type(whole).__name__} ({whole.config.model_type}): {total:,} parameters in float64, "
        f"of which a rank of tp={tp}{'' if ep is None else f', ep={ranks}'} holds {mine / total:.0%}"
    ]
    moved = {name: x.to(ctx.backend.device()) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    try:
        sharded, plain = (m.to(ctx.backend.device()) for m in (model, whole))
        compare(sharded, plain, moved, tolerance=TOLERANCE, reduce=ep is not None)
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


def _rows(inputs: Mapping[str, Any], ranks: int, index: int) -> dict[str, Any]:
    return {name: x.chunk(ranks)[index] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def _by_examples(whole: Any, ranks: int) -> None:
    """Let ``whole`` give the mean of the losses of so many equal parts of a batch, as data ranks have them."""
    forward = whole.forward

    def run(**inputs: Any) -> Any:
        outs = [forward(**_rows(inputs, ranks, i)) for i in range(ranks)]
        return type(outs[0])(
            loss=torch.stack([out.loss for out in outs]).mean(), logits=torch.cat([out.logits for out in outs])
        )

    whole.forward = run


def _of_rank(model: Any, ep: Comm, index: int) -> None:
    """Let ``model`` take this rank's examples, and give all logits and the mean loss with the gradient of its own."""
    forward = model.forward

    def run(**inputs: Any) -> Any:
        out = forward(**_rows(inputs, ep.size, index))
        own = out.loss.detach()
        mean = ep.all_reduce(own.reshape(1))[0] / ep.size
        return type(out)(loss=out.loss + (mean - own), logits=ep.all_gather(out.logits.detach(), 0))

    model.forward = run
