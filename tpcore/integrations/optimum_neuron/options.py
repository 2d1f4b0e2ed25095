"""The options of cutting a model, by optimum-neuron's names."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from torch import nn

from ...models import parallelize
from ...models.transformers import vocabulary
from ...runtime.context import ParallelContext, current, is_initialized
from ...runtime.init import init
from ..transformers.files import is_cut
from .notes import note

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


def defaults_of(cls: Any) -> dict[str, Any]:
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}


@dataclass
class ModelParallelismPlugin:
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


def whole_ends(model: Any) -> dict[str, Any]:
    """Rules that leave the vocabulary whole on every rank."""
    ends = [module for module in vocabulary(model) if module is not None]
    return {name: "replicate" for name, module in model.named_modules() if module in ends}


def recompute(model: Any) -> None:
    """Turn activation checkpointing on, which transformers has given another name in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


@dataclass
class TrainingNeuronConfig:
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
        if self.virtual_pipeline_parallel_size > 1 or self.fuse_qkv:
            raise ValueError(
                f"virtual_pipeline_parallel_size={self.virtual_pipeline_parallel_size}, fuse_qkv="
                f"{self.fuse_qkv}: a stage runs its layers in one piece, and projections stay as the model "
                "has them; leave both out"
            )
        join(self.tensor_parallel_size, self.pipeline_parallel_size)
        note(vars(self), defaults_of(type(self)))

    @property
    def plugin(self) -> ModelParallelismPlugin:
        known = {f.name for f in fields(ModelParallelismPlugin)}
        return ModelParallelismPlugin(**{k: v for k, v in vars(self).items() if k in known})

    @property
    def should_parallelize(self) -> bool:
        return self.plugin.should_parallelize

    def parallelize_model(self, model: Model, device: Any = None) -> Model:
        """Like ``ModelParallelismPlugin.parallelize_model``."""
        return self.plugin.parallelize_model(model, device)
