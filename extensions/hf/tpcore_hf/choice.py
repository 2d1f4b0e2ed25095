"""The mesh of a Trainer that is asked to choose it: the fastest that is predicted."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import tpcore
from tpcore import settings
from tpcore.log import inform
from tpcore.runtime.consensus import agree, gather
from tpcore.runtime.context import current
from tpcore.runtime.init import remesh

from . import parallelize
from .model_files import is_sharded

AUTO = "auto"
_MACHINES = {"cpu": "cpu", "cuda": "h100x8", "xla": "trn1.32xlarge"}
_TOKENS = 2048


def choose_mesh(model: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """Divide the job by the fastest plan, cut ``model``, and set the microbatches and the recomputation in ``args``.

    The examples of a step stay what they are without a mesh: ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` on each rank. ``options``: of ``tpcore.plan``. Collective. Raises ValueError for a
    job or a model that is divided already, and where nothing fits.
    """
    ctx = current()
    if ctx.mesh.size != ctx.batch.size or is_sharded(model):
        raise ValueError(
            f"mesh={AUTO!r} divides the job and cuts the model, and they are already, on {dict(ctx.mesh.axes)}: call "
            "tpcore.init() without degrees, and leave tpcore.parallelize out"
        )
    world = ctx.world.size
    defaults: dict[str, Any] = {"machine": _MACHINES.get(ctx.device.type, "cpu"), "dtype": model.dtype}
    defaults["per_host"] = min(settings.LOCAL_WORLD_SIZE.get() or world, world)
    defaults["seq_len"] = min(_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", _TOKENS))
    defaults["batch"] = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
    with tempfile.TemporaryDirectory() as folder:
        config = type(model.config)(**{**model.config.to_dict(), "architectures": [type(model).__name__]})
        config.save_pretrained(folder)
        mesh_plan = tpcore.plan(folder, devices=world, **{**defaults, **options})
    agree(
        gather(str(mesh_plan.rows[0].choice) if mesh_plan.rows else "no mesh", ctx.world),
        lambda rank, first, other: ValueError(
            f"rank 0 would take {first} and rank {rank} {other}: give all hosts one machine's file"
        ),
    )
    choice = mesh_plan.best.choice
    ways, staged = choice.ways, choice.pp > 1
    remesh(tp=ways.tp, pp=choice.pp, ep=ways.ep, cp=ways.cp)
    parallelize(model, num_microbatches=choice.microbatches if staged else None, **ways.options())
    args.per_device_train_batch_size = choice.microbatch * (choice.microbatches if staged else 1)
    args.gradient_accumulation_steps = 1 if staged else choice.microbatches
    args.gradient_checkpointing = choice.recompute and not staged
    if ctx.rank == 0:
        step, size = f"{mesh_plan.best.step:.3g} s a step", f"{mesh_plan.best.nbytes / 1e9:.3g} GB a device"
        inform(f"mesh {choice}: {step} and {size} predicted")
    return choice
