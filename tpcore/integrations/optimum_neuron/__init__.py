"""The names by which training scripts know optimum-neuron, over tpcore's own parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import extra

with extra("trainer", __name__):
    from .distributed import (
        NeuronModelForCausalLM,
        NeuronPeftModel,
        NeuronPeftModelForCausalLM,
        Parallelizer,
        ParallelizersManager,
        consolidate_model_parallel_checkpoints_to_unified_checkpoint,
        lazy_load_for_parallelism,
        make_optimizer_constructor_lazy,
    )
    from .options import ModelParallelismPlugin, TrainingNeuronConfig
    from .trainers import NeuronAccelerator, NeuronTrainer, Seq2SeqNeuronTrainer
    from .training_args import (
        NeuronHfArgumentParser,
        NeuronTrainingArguments,
        Seq2SeqNeuronTrainingArguments,
        send_example_telemetry,
    )

if TYPE_CHECKING:
    from ..peft import get_peft_model
    from .sft import NeuronSFTConfig, NeuronSFTTrainer


def __getattr__(name: str) -> Any:
    # on first use: few scripts have peft and TRL
    module = {"get_peft_model": "..peft", "NeuronSFTConfig": ".sft", "NeuronSFTTrainer": ".sft"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


__all__ = [
    "ModelParallelismPlugin",
    "NeuronAccelerator",
    "NeuronHfArgumentParser",
    "NeuronModelForCausalLM",
    "NeuronPeftModel",
    "NeuronPeftModelForCausalLM",
    "NeuronSFTConfig",
    "NeuronSFTTrainer",
    "NeuronTrainer",
    "NeuronTrainingArguments",
    "Parallelizer",
    "ParallelizersManager",
    "Seq2SeqNeuronTrainer",
    "Seq2SeqNeuronTrainingArguments",
    "TrainingNeuronConfig",
    "consolidate_model_parallel_checkpoints_to_unified_checkpoint",
    "get_peft_model",
    "lazy_load_for_parallelism",
    "make_optimizer_constructor_lazy",
    "send_example_telemetry",
]
