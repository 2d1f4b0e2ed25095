"""optimum-neuron's options of cutting a model, and its functions and classes that take them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar

import torch
import transformers
from torch import nn

from tpcore.log import inform
from tpcore.runtime.context import ParallelContext, current, is_initialized
from tpcore.runtime.init import init
from tpcore_convert.rewrite import consolidate
from tpcore_hf import lazy, parallelize
from tpcore_hf.model_files import is_sharded
from tpcore_hf.plan.families import KINDS
from tpcore_hf.plan.model import REFUSED, checked_model, rules_of, vocabulary

Model = TypeVar("Model", bound=nn.Module)


def join(tp: int, pp: int = 1) -> ParallelContext:
    """The context of this job, which starts here if nothing has started it. ValueError for another mesh."""
    ctx = current() if is_initialized() else init(tp=tp, pp=pp)
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


def note(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Print the line of every option that is given as something else than its default, on rank 0."""
    for name, value in options.items():
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
        to ``device`` if that is given. A model that is sharded already stays as it is."""
        join(self.tensor_parallel_size, self.pipeline_parallel_size)
        note(vars(self), defaults_of(type(self)))
        if not is_sharded(model):
            stages = self.pipeline_parallel_size > 1
            whole = () if self.parallelize_embeddings else [end for end in vocabulary(model) if end is not None]
            parallelize(
                model,
                plan={name: "replicate" for name, module in model.named_modules() if module in whole},
                sequence_parallel=self.sequence_parallel_enabled and self.tensor_parallel_size > 1,
                num_microbatches=self.pipeline_parallel_num_microbatches if stages else None,
                lazy_from=self.checkpoint_dir,
            )
        if self.gradient_checkpointing:  # which transformers has given another name in 5.23
            hf_model: Any = model
            (getattr(hf_model, "activation_checkpointing_enable", None) or hf_model.gradient_checkpointing_enable)()
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


_FLASH = "flash_attention_2"


@contextmanager
def lazy_load_for_parallelism(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Iterator[None]:
    """Within, ``from_pretrained`` makes shapes only of a model that will be sharded: each rank reads its part."""
    parallel = (tensor_parallel_size, pipeline_parallel_size) != (1, 1)
    if parallel:
        join(tensor_parallel_size, pipeline_parallel_size)
    with lazy() if parallel else nullcontext():
        yield


def make_optimizer_constructor_lazy(optimizer_cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """``optimizer_cls`` itself: parameters stay the same objects when a model is sharded, and most optimizers make
    their state at the first step. ValueError for one that makes it at once, as Adagrad does."""
    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    if optimizer_cls([probe], lr=1e-3).state:  # type: ignore[call-arg]
        raise ValueError(
            f"{optimizer_cls.__name__} makes its state at once, of the shapes that parameters have then: "
            "make it once the model is sharded and moved, or use tpcore.Zero1, which waits for the first step"
        )
    return optimizer_cls


def consolidate_model_parallel_checkpoints_to_unified_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    save_format: Literal["pytorch", "safetensors"] = "safetensors",
) -> None:
    """One model that ``from_pretrained`` opens, out of a run's checkpoint or its ``tensor_parallel_shards``, as
    ``tpcore checkpoint consolidate`` makes it. ValueError for another format."""
    if save_format not in ("pytorch", "safetensors"):
        raise ValueError(f"save_format must be 'pytorch' or 'safetensors', not {save_format!r}")
    consolidate(checkpoint_dir, output_dir, pickled=save_format == "pytorch")


@dataclass(frozen=True)
class Parallelizer:
    """Cuts a model of one type."""

    model_type: str

    def parallelize(self, model: Any, device: Any = None, **options: Any) -> Any:
        """``model``, cut in place; over the ranks of the current job where no size is given. ``options``: fields of
        ``ModelParallelismPlugin``."""
        if model.config.model_type != self.model_type:
            raise ValueError(f"a parallelizer for {self.model_type} was given a {model.config.model_type}")
        for name, axis in (("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp")):
            if options.get(name) is None:
                options[name] = current().mesh.axes.get(axis, 1)
        return ModelParallelismPlugin(**options).parallelize_model(model, device)


class ParallelizersManager:
    """Which models can be sharded, and how."""

    @staticmethod
    def get_supported_model_types() -> list[str]:
        """The model types with a plan of tpcore. Models with a plan of transformers are supported as well."""
        return sorted(KINDS)

    @classmethod
    def is_model_supported(cls, model_type_or_model: str | nn.Module) -> bool:
        """Whether ``tpcore.parallelize`` finds a plan for it: its own, or that of transformers."""
        if isinstance(model_type_or_model, str):
            configs = transformers.CONFIG_MAPPING
            in_transformers = model_type_or_model in configs and model_type_or_model not in REFUSED
            planned = in_transformers and bool(getattr(configs[model_type_or_model], "base_model_tp_plan", None))
            return planned or model_type_or_model in KINDS
        try:
            rules_of(checked_model(model_type_or_model), {})
        except (TypeError, ValueError):
            return False
        return True

    @classmethod
    def parallelizer_for_model(cls, model_type_or_model: Any) -> Parallelizer:
        """ValueError for a model that has no plan, with what to say instead."""
        if isinstance(model_type_or_model, str):
            if not cls.is_model_supported(model_type_or_model):
                supported = cls.get_supported_model_types()
                raise ValueError(f"{model_type_or_model} has no plan in transformers and is not among {supported}")
            return Parallelizer(model_type_or_model)
        rules_of(checked_model(model_type_or_model), {})
        return Parallelizer(model_type_or_model.config.model_type)


class NeuronModelForCausalLM:
    """``transformers.AutoModelForCausalLM``, whose models come sharded as a ``trn_config`` says."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], trn_config: Options, *args: Any, **options: Any
    ) -> Any:
        """The sharded model, of which each rank has read its part. ``use_flash_attention_2`` and an
        ``attn_implementation`` of that name are attention of torch's, ``sdpa``."""
        _as_sdpa(options)
        with lazy() if trn_config.should_parallelize else nullcontext():
            model = transformers.AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        return trn_config.parallelize_model(model) if trn_config.should_parallelize else model

    @classmethod
    def from_config(cls, config: Any, trn_config: Options, **options: Any) -> Any:
        """The sharded model with initial values."""
        _as_sdpa(options)
        return trn_config.parallelize_model(transformers.AutoModelForCausalLM.from_config(config, **options))


def _as_sdpa(options: dict[str, Any]) -> None:
    if options.pop("use_flash_attention_2", False) or options.get("attn_implementation") == _FLASH:
        options["attn_implementation"] = "sdpa"
        if current().rank == 0:
            inform(f"{_FLASH}: attention is torch's scaled_dot_product_attention")


class NeuronPeftModel:
    """``peft.PeftModel`` for a sharded model."""

    @classmethod
    def from_pretrained(cls, model: Any, model_id: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        """``tpcore_hf.peft.from_pretrained``."""
        from tpcore_hf.peft import from_pretrained

        return from_pretrained(model, model_id, *args, **options)


class NeuronPeftModelForCausalLM(NeuronPeftModel):
    """The same; peft makes its ``PeftModelForCausalLM`` where the adapters' files are of that task."""
