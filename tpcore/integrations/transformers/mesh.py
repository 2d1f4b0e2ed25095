"""The mesh of a Trainer that is asked to choose it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from torch import nn

from ... import settings
from ...diagnose.plan.choice import Choice
from ...diagnose.plan.search import MeshPlan, plan
from ...log import inform
from ...models import parallelize
from ...models.guards import is_guarded
from ...runtime.consensus import agree, gather
from ...runtime.context import current
from ...runtime.init import remesh
from .files import is_cut

AUTO = "auto"
_MACHINES = {"cpu": "cpu", "cuda": "h100x8", "xla": "trn1.32xlarge"}
_TOKENS = 2048


def choose_mesh(model: Any, args: Any, options: Mapping[str, Any]) -> Choice:
    """Divide the job by the fastest plan, cut ``model``, and set the microbatches and the recomputation in ``args``.

    The examples of a step stay what they are without a mesh: ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` on each rank. ``options``: of ``tpcore.plan``. Collective. Raises ValueError for a
    job or a model that is divided already, and where nothing fits.
    """
    ctx = current()
    if ctx.mesh.size != ctx.batch.size or is_cut(model) or is_guarded(model):
        raise ValueError(
            f"mesh={AUTO!r} divides the job and cuts the model, and they are already, on {dict(ctx.mesh.axes)}: call "
            "tpcore.init() without degrees, and leave tpcore.parallelize out"
        )
    world = ctx.world.size
    per_host = min(settings.LOCAL_WORLD_SIZE.get() or world, world)
    wanted: dict[str, Any] = {
        "machine": _MACHINES.get(ctx.device.type, "cpu"),
        "per_host": per_host,
        "dtype": model.dtype,
    }
    wanted["seq_len"] = min(_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", _TOKENS))
    wanted["batch"] = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
    with tempfile.TemporaryDirectory() as folder:
        config = type(model.config)(**{**model.config.to_dict(), "architectures": [type(model).__name__]})
        config.save_pretrained(folder)
        found: MeshPlan = plan(folder, devices=world, **{**wanted, **options})
    agree(
        gather(str(found.rows[0].choice) if found.rows else "no mesh", ctx.world),
        lambda rank, first, other: ValueError(
            f"rank 0 would take {first} and rank {rank} {other}: give all hosts one machine's file"
        ),
    )
    row = found.best
    _divide(model, args, row.choice)
    if ctx.rank == 0:
        inform(f"mesh {row.choice}: {row.step:.3g} s a step and {row.nbytes / 1e9:.3g} GB a device predicted")
    return row.choice


def _divide(model: nn.Module, args: Any, choice: Choice) -> None:
    ways, staged = choice.ways, choice.pp > 1
    remesh(tp=ways.tp, pp=choice.pp, ep=ways.ep, cp=ways.cp)
    parallelize(model, num_microbatches=choice.microbatches if staged else None, **ways.options())
    args.per_device_train_batch_size = choice.microbatch * (choice.microbatches if staged else 1)
    args.gradient_accumulation_steps = 1 if staged else choice.microbatches
    args.gradient_checkpointing = choice.recompute and not staged
