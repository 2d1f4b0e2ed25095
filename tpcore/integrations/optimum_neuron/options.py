"""The options of cutting a model, by optimum-neuron's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from torch import nn

from ...log import inform
from ...models import parallelize
from ...models.transformers import vocabulary
from ...runtime.context import ParallelContext, current, is_initialized
from ...runtime.init import init
from ..transformers.files import is_cut

Model = TypeVar("Model", bound=nn.Module)


def join(tp: int, pp: int = 1) -> ParallelContext:
    """The context of this job, which starts here if nothing has started it. ValueError for another mesh."""
    if not is_initialized():
        return init(tp=tp, pp=pp)
    ctx = current()
    mesh = dict(ctx.mesh.axes)
    if (mesh.get("tp", 1), mesh.get("pp", 1)) != (tp, pp):
        raise ValueError(
            f"tensor_parallel_size={tp} and pipeline_parallel_size={pp}, and the job has the mesh {mesh}: "
            "they are one job's, the same everywhere"
        )
    return ctx


NOTES = {
    "kv_size_multiplier": "consecutive ranks hold the same key and value head where tp is above their number",
    "num_local_ranks_per_step": "each rank reads and writes its own part, one tensor at a time",
    "use_xser": "tensors are written one by one in safetensors",
    "half_precision_backend": "bf16 is autocast of torch on every backend",
    "autocast_backend": "bf16 is autocast of torch on every backend",
    "neuron_cc_optlevel": "the compiler takes it from NEURON_CC_FLAGS",
    "skip_cache_push": "no compiled program is sent anywhere",
    "stochastic_rounding_enabled": "the device takes it from NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "optimizer_save_master_weights_in_ckpt": "a Zero1's master weights are always saved with its state",
    "recompute_causal_mask": "models make their masks themselves",
    "fuse_qkv": "projections stay as the model has them, with the same results",
    "transpose_nki_inputs": "attention is that of the model",
}


def note(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Print the line of every option that is given as something else than its default, on rank 0."""
    for name, value in given.items():
        if name in NOTES and value != defaults[name] and current().rank == 0:
            inform(f"{name}={value!r} needs nothing here: {NOTES[name]}")


def defaults_of(cls: Any) -> dict[str, Any]:
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}


class _Parallelism:
    """What both classes of options do with their fields."""

    tensor_parallel_size: int
    parallelize_embeddings: bool = True
    sequence_parallel_enabled: bool
    pipeline_parallel_size: int
    pipeline_parallel_num_microbatches: int
    gradient_checkpointing: bool
    checkpoint_dir: str | None

    @property
    def should_parallelize(self) -> bool:
        return self.tensor_parallel_size > 1 or self.pipeline_parallel_size > 1

    def parallelize_model(self, model: Model, device: Any = None) -> Model:
        """``model`` cut as the fields say, in place, with its weights read if it was made lazily, and moved
        to ``device`` if that is given. A model that is cut already stays as it is."""
        join(self.tensor_parallel_size, self.pipeline_parallel_size)
        note(vars(self), defaults_of(type(self)))
        if not is_cut(model):
            stages = self.pipeline_parallel_size > 1
            parallelize(
                model,
                plan={} if self.parallelize_embeddings else whole_ends(model),
                sequence_parallel=self.sequence_parallel_enabled and self.tensor_parallel_size > 1,
                num_microbatches=self.pipeline_parallel_num_microbatches if stages else None,
                lazy_from=self.checkpoint_dir,
            )
        if self.gradient_checkpointing:
            recompute(model)
        return model if device is None else model.to(device)


@dataclass
class ModelParallelismPlugin(_Parallelism):
    """The mesh and the cut. Fields are optimum-neuron's, in its order."""

    tensor_parallel_size: int = 1
    parallelize_embeddings: bool = True
    sequence_parallel_enabled: bool = False
    kv_size_multiplier: int | None = None
    pipeline_parallel_size: int = 1
    pipeline_parallel_num_microbatches: int = 1
    pipeline_parallel_use_zero1_optimizer: bool = False
    gradient_checkpointing: bool = False
    checkpoint_dir: str | None = None
    num_local_ranks_per_step: int = 8
    use_xser: bool = True
    async_save: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "pipeline_parallel_num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")


def whole_ends(model: Any) -> dict[str, Any]:
    """Rules that leave the vocabulary whole on every rank."""
    ends = [module for module in vocabulary(model) if module is not None]
    return {name: "replicate" for name, module in model.named_modules() if module in ends}


def recompute(model: Any) -> None:
    """Turn activation checkpointing on, which transformers has given another name in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


@dataclass
class TrainingNeuronConfig(_Parallelism):
    """The mesh and the cut, as later releases say it; joins the job."""

    tensor_parallel_size: int = 1
    sequence_parallel_enabled: bool = False
    kv_size_multiplier: int | None = None
    pipeline_parallel_size: int = 1
    virtual_pipeline_parallel_size: int = 1
    pipeline_parallel_num_microbatches: int = 1
    pipeline_parallel_use_zero1_optimizer: bool = False
    gradient_checkpointing: bool = False
    checkpoint_dir: str | None = None
    num_local_ranks_per_step: int = 8
    use_xser: bool = True
    async_save: bool = False
    fuse_qkv: bool = False
    recompute_causal_mask: bool = True
    transpose_nki_inputs: bool = True

    def __post_init__(self) -> None:
        if self.virtual_pipeline_parallel_size > 1:
            raise ValueError(
                f"virtual_pipeline_parallel_size={self.virtual_pipeline_parallel_size}: a stage runs its layers in one "
                "piece; leave it out"
            )
        join(self.tensor_parallel_size, self.pipeline_parallel_size)
        note(vars(self), defaults_of(type(self)))


Options = ModelParallelismPlugin | TrainingNeuronConfig
"""Either way to say it. Their fields have other orders, as published, and are given by position too."""
