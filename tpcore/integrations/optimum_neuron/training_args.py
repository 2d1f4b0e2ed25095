"""The flags of optimum-neuron's training scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from ...runtime.context import current
from .options import ModelParallelismPlugin, TrainingNeuronConfig, defaults_of, join, note


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class NeuronTrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with the flags of optimum-neuron. Joins the job: one whose ranks a
    launcher such as torchrun started, with the mesh that the flags name."""

    zero_1: bool = _flag(False, "Each data-parallel rank keeps the optimizer's state of its part.")
    tensor_parallel_size: int = _flag(1, "Over how many ranks layers are cut.")
    disable_embedding_parallelization: bool = _flag(False, "Leave the vocabulary whole on every rank.")
    disable_sequence_parallel: bool = _flag(False, "Leave tokens whole between the cut layers.")
    pipeline_parallel_size: int = _flag(1, "Over how many stages layers are spread.")
    pipeline_parallel_num_microbatches: int = _flag(-1, "Parts of a batch; -1: one of each example.")
    kv_size_multiplier: int | None = _flag(None, "Follows from tensor_parallel_size.")
    num_local_ranks_per_step: int = _flag(8, "Needs nothing here.")
    use_xser: bool = _flag(True, "Needs nothing here.")
    async_save: bool = _flag(False, "Write checkpoints' tensors in the background.")
    half_precision_backend: str = _flag("xla", "Needs nothing here.")
    neuron_cc_optlevel: str = _flag("auto", "The compiler takes it from NEURON_CC_FLAGS.")
    skip_cache_push: bool = _flag(False, "Needs nothing here.")
    stochastic_rounding_enabled: bool = _flag(False, "The device takes it from its environment.")
    optimizer_use_master_weights: bool = _flag(None, "With zero_1: float32 copies of the weights. So with bf16.")
    optimizer_use_fp32_grad_acc: bool = _flag(None, "With zero_1: sum gradients in float32. So with bf16.")
    optimizer_save_master_weights_in_ckpt: bool = _flag(False, "They are always saved.")
    fuse_qkv: bool = _flag(False, "Needs nothing here.")
    recompute_causal_mask: bool = _flag(True, "Needs nothing here.")
    warmup_ratio: float = _flag(0.0, "warmup_steps as a part of all steps, by its name before transformers 5.")
    overwrite_output_dir: bool = _flag(False, "For the script: start anew where output_dir has checkpoints.")

    def __post_init__(self) -> None:
        join(self.tensor_parallel_size, self.pipeline_parallel_size)
        if not self.zero_1 and (self.optimizer_use_master_weights or self.optimizer_use_fp32_grad_acc):
            raise ValueError(
                "optimizer_use_master_weights and optimizer_use_fp32_grad_acc are of the optimizer that "
                "zero_1 makes: give --zero_1 as well"
            )
        self.warmup_steps = self.warmup_steps or self.warmup_ratio
        self.use_cpu = self.use_cpu or current().device.type == "cpu"  # a GPU that is there is not used
        super().__post_init__()
        note(vars(self), defaults_of(NeuronTrainingArguments))
        if self.pipeline_parallel_size > 1:
            self._one_batch_a_step()

    def _one_batch_a_step(self) -> None:
        """The batches of one step go through the stages together, one example a microbatch if no number is given."""
        self.per_device_train_batch_size *= self.gradient_accumulation_steps
        self.gradient_accumulation_steps = 1
        batch = self.per_device_train_batch_size
        if self.pipeline_parallel_num_microbatches == -1:
            self.pipeline_parallel_num_microbatches = batch
        if batch % self.pipeline_parallel_num_microbatches:
            raise ValueError(
                f"pipeline_parallel_num_microbatches={self.pipeline_parallel_num_microbatches} does not "
                f"divide a step's batch of {batch} on each data-parallel rank"
            )

    @property
    def mp_plugin(self) -> ModelParallelismPlugin:
        """The options of cutting a model."""
        return ModelParallelismPlugin(
            tensor_parallel_size=self.tensor_parallel_size,
            parallelize_embeddings=not self.disable_embedding_parallelization,
            sequence_parallel_enabled=not self.disable_sequence_parallel,
            pipeline_parallel_size=self.pipeline_parallel_size,
            pipeline_parallel_num_microbatches=max(1, self.pipeline_parallel_num_microbatches),
            pipeline_parallel_use_zero1_optimizer=self.zero_1,
            async_save=self.async_save,
        )

    @property
    def trn_config(self) -> TrainingNeuronConfig:
        """The options of cutting a model, for scripts of later releases."""
        return TrainingNeuronConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            sequence_parallel_enabled=not self.disable_sequence_parallel,
            pipeline_parallel_size=self.pipeline_parallel_size,
            pipeline_parallel_num_microbatches=max(1, self.pipeline_parallel_num_microbatches),
        )

    @property
    def zero1_options(self) -> bool | dict[str, Any]:
        """The options of ``tpcore.Zero1``; False for an optimizer of torch."""
        if not self.zero_1:
            return False
        wide = {"master_dtype": self.optimizer_use_master_weights, "grad_dtype": self.optimizer_use_fp32_grad_acc}
        return {name: torch.float32 for name, asked in wide.items() if (self.bf16 if asked is None else asked)}


@dataclass
class Seq2SeqNeuronTrainingArguments(NeuronTrainingArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments`` with the same flags."""


class NeuronHfArgumentParser(transformers.HfArgumentParser):
    """``transformers.HfArgumentParser``: the flags are those of the dataclasses that it is given."""


def send_example_telemetry(*args: Any, **kwargs: Any) -> None:
    """Nothing, where scripts call what transformers had before 5: no telemetry is sent."""
