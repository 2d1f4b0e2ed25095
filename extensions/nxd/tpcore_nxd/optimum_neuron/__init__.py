"""The names by which training scripts know optimum-neuron, over tpcore's own parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpcore.errors import extra

with extra("trainer", __name__):
    from .options import (
        ModelParallelismPlugin,
        NeuronModelForCausalLM,
        NeuronPeftModel,
        NeuronPeftModelForCausalLM,
        Parallelizer,
        ParallelizersManager,
        TrainingNeuronConfig,
        consolidate_model_parallel_checkpoints_to_unified_checkpoint,
        lazy_load_for_parallelism,
        make_optimizer_constructor_lazy,
    )
    from .trainers import (
        NeuronAccelerator,
        NeuronHfArgumentParser,
        NeuronTrainer,
        NeuronTrainingArguments,
        Seq2SeqNeuronTrainer,
        Seq2SeqNeuronTrainingArguments,
        send_example_telemetry,
    )

if TYPE_CHECKING:
    from tpcore_hf.peft import get_peft_model

    from .sft import NeuronSFTConfig, NeuronSFTTrainer

__all__ = ["ModelParallelismPlugin", "Parallelizer", "ParallelizersManager", "TrainingNeuronConfig"]
__all__ += ["NeuronAccelerator", "NeuronHfArgumentParser", "NeuronTrainer", "NeuronTrainingArguments"]
__all__ += ["NeuronModelForCausalLM", "NeuronPeftModel", "NeuronPeftModelForCausalLM", "get_peft_model"]
__all__ += ["NeuronSFTConfig", "NeuronSFTTrainer", "Seq2SeqNeuronTrainer", "Seq2SeqNeuronTrainingArguments"]
__all__ += ["lazy_load_for_parallelism", "make_optimizer_constructor_lazy", "send_example_telemetry"]
__all__ += ["consolidate_model_parallel_checkpoints_to_unified_checkpoint"]


def __getattr__(name: str) -> Any:
    # on first use: few scripts have peft and TRL
    module = {"get_peft_model": "tpcore_hf.peft", "NeuronSFTConfig": ".sft", "NeuronSFTTrainer": ".sft"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)
