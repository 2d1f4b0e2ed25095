"""optimum-neuron's classes of models, over those of transformers and peft."""

from __future__ import annotations

import os
from typing import Any

import transformers

from ...log import inform
from ...models import lazy
from ...runtime.context import current
from .options import ModelParallelismPlugin, TrainingNeuronConfig

Options = TrainingNeuronConfig | ModelParallelismPlugin
_FLASH = "flash_attention_2"


class NeuronModelForCausalLM:
    """``transformers.AutoModelForCausalLM``, whose models come sharded as a ``trn_config`` says."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], trn_config: Options, *args: Any, **options: Any
    ) -> Any:
        """The sharded model, of which each rank has read its part. ``use_flash_attention_2`` and an
        ``attn_implementation`` of that name are attention of torch's, ``sdpa``."""
        _as_sdpa(options)
        if not trn_config.should_parallelize:
            return transformers.AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        with lazy():
            model = transformers.AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        return trn_config.parallelize_model(model)

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
