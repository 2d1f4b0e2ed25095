"""optimum-neuron's functions and classes for parallel models, over those of tpcore, transformers and peft."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn

from ...checkpoint.rewrite import consolidate
from ...log import inform
from ...models import lazy
from ...models.families import KINDS
from ...models.transformers import REFUSED, checked_model, rules_of
from ...runtime.context import current
from .options import ModelParallelismPlugin, Options, join

_FLASH = "flash_attention_2"


@contextmanager
def lazy_load_for_parallelism(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Iterator[None]:
    """Within, ``from_pretrained`` makes shapes only of a model that will be cut: each rank reads its part."""
    parallel = (tensor_parallel_size, pipeline_parallel_size) != (1, 1)
    if parallel:
        join(tensor_parallel_size, pipeline_parallel_size)
    with lazy() if parallel else nullcontext():
        yield


def make_optimizer_constructor_lazy(optimizer_cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """``optimizer_cls`` itself: parameters stay the same objects when a model is cut, and most optimizers make their
    state at the first step. ValueError for one that makes it at once, as Adagrad does."""
    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    if optimizer_cls([probe], lr=1e-3).state:  # type: ignore[call-arg]
        raise ValueError(
            f"{optimizer_cls.__name__} makes its state at once, of the shapes that parameters have then: "
            "make it once the model is cut and moved, or use tpcore.Zero1, which waits for the first step"
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


def _has_plan(model_type: str) -> bool:
    """Whether transformers has a plan for a family, and it is right."""
    known = transformers.CONFIG_MAPPING
    there = model_type in known and model_type not in REFUSED
    return there and bool(getattr(known[model_type], "base_model_tp_plan", None))


class ParallelizersManager:
    """Which models can be cut, and how."""

    @staticmethod
    def get_supported_model_types() -> list[str]:
        """The model types with a plan of tpcore. Models with a plan of transformers are supported as well."""
        return sorted(KINDS)

    @classmethod
    def is_model_supported(cls, model_type_or_model: str | nn.Module) -> bool:
        """Whether ``tpcore.parallelize`` finds a plan for it: its own, or that of transformers."""
        if isinstance(model_type_or_model, str):
            return _has_plan(model_type_or_model) or model_type_or_model in cls.get_supported_model_types()
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
                raise ValueError(
                    f"{model_type_or_model} has no plan in transformers and is not among "
                    f"{cls.get_supported_model_types()}"
                )
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
        """``tpcore.integrations.peft.from_pretrained``."""
        from ..peft import from_pretrained

        return from_pretrained(model, model_id, *args, **options)


class NeuronPeftModelForCausalLM(NeuronPeftModel):
    """The same; peft makes its ``PeftModelForCausalLM`` where the adapters' files are of that task."""
