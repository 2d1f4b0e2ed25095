"""optimum-neuron's flags, Trainer and Accelerator: they cut the model by their arguments, and save it in parts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import transformers
from torch import nn

from tpcore.log import inform
from tpcore.runtime.context import current
from tpcore_hf.accelerate import Accelerator
from tpcore_hf.model_files import save_in_parts
from tpcore_hf.trainer import Trainer, over_dp

from .options import ModelParallelismPlugin, TrainingNeuronConfig, defaults_of, join, note

_AFTER_ARGS = list(inspect.signature(transformers.Trainer.__init__).parameters)[3:]


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class NeuronTrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with the flags of optimum-neuron. Joins the job: one whose ranks a
    launcher such as torchrun started, with the mesh that the flags name."""

    zero_1: bool = _flag(False, "Each data-parallel rank keeps the optimizer's state of its part.")
    tensor_parallel_size: int = _flag(1, "Over how many ranks layers are sharded.")
    disable_embedding_parallelization: bool = _flag(False, "Leave the vocabulary whole on every rank.")
    disable_sequence_parallel: bool = _flag(False, "Leave tokens whole between the sharded layers.")
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
        if self.pipeline_parallel_size == 1:
            return
        # the batches of one step go through the stages together, one example a microbatch if no number is given
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

    def _mesh_options(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "sequence_parallel_enabled": not self.disable_sequence_parallel,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "pipeline_parallel_num_microbatches": max(1, self.pipeline_parallel_num_microbatches),
        }

    @property
    def mp_plugin(self) -> ModelParallelismPlugin:
        """The options of cutting a model."""
        embeddings = not self.disable_embedding_parallelization
        options = self._mesh_options() | {"pipeline_parallel_use_zero1_optimizer": self.zero_1}
        return ModelParallelismPlugin(parallelize_embeddings=embeddings, async_save=self.async_save, **options)

    @property
    def trn_config(self) -> TrainingNeuronConfig:
        """The options of cutting a model, for scripts of later releases."""
        return TrainingNeuronConfig(**self._mesh_options())

    @property
    def zero1_options(self) -> bool | dict[str, Any]:
        """The options of ``tpcore.Zero1``; False for an optimizer of torch."""
        if not self.zero_1:
            return False
        wide = {"master_dtype": self.optimizer_use_master_weights, "grad_dtype": self.optimizer_use_fp32_grad_acc}
        return {name: torch.float32 for name, flag in wide.items() if (self.bf16 if flag is None else flag)}


@dataclass
class Seq2SeqNeuronTrainingArguments(NeuronTrainingArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments`` with the same flags."""


class NeuronHfArgumentParser(transformers.HfArgumentParser):
    """``transformers.HfArgumentParser``: the flags are those of the dataclasses that it is given."""


def send_example_telemetry(*args: Any, **kwargs: Any) -> None:
    """Nothing, where scripts call what transformers had before 5: no telemetry is sent."""


class NeuronTrainer(Trainer):
    """``tpcore_hf.trainer.Trainer`` that cuts ``model`` as ``NeuronTrainingArguments`` say.

    The model may come from ``lazy_load_for_parallelism``. A checkpoint holds a sharded model in parts, in
    ``tensor_parallel_shards``: ``tpcore checkpoint consolidate`` makes one model of them, which
    ``from_pretrained`` opens. Any mesh resumes from it. ``tokenizer``: the ``processing_class``, by the name
    that it had before transformers 5.
    """

    args: Any
    arguments: type[NeuronTrainingArguments] = NeuronTrainingArguments

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        args = self.arguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, self.arguments):
            raise TypeError(f"{type(self).__name__} takes {self.arguments.__name__}, not {type(args).__name__}")
        if "tokenizer" in options:
            options["processing_class"] = options.pop("tokenizer")
        plugin = args.mp_plugin
        model = None if model is None else plugin.parallelize_model(model)
        if (make := options.get("model_init")) is not None:
            options["model_init"] = wraps(make)(lambda *args: plugin.parallelize_model(make(*args)))
        positional = zip(_AFTER_ARGS, rest, strict=False)
        super().__init__(model, args=args, zero1=args.zero1_options, **dict(positional), **options)
        trained = {p.dtype for p in self.model.parameters() if p.requires_grad}
        if torch.bfloat16 in trained and not args.zero_1 and current().rank == 0:
            inform("zero_1=False: bfloat16 weights without float32 copies; --zero_1, in 0.4 the default, keeps them")

    def save_weights(self, where: str) -> None:
        if isinstance(getattr(self.model, "peft_config", None), dict):
            super().save_weights(where)  # adapters are small: peft's files
        else:
            save_in_parts(self.model, where, in_background=self.args.async_save)


class Seq2SeqNeuronTrainer(NeuronTrainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, which can evaluate by generating, with what ``NeuronTrainer`` adds."""

    arguments = Seq2SeqNeuronTrainingArguments


class NeuronAccelerator(Accelerator):
    """``tpcore_hf.accelerate.Accelerator`` that cuts models as ``mp_plugin`` or ``trn_config`` says
    when they are prepared, and, with ``zero_1``, optimizers over dp. Joins the job."""

    def __init__(
        self,
        *args: Any,
        mp_plugin: ModelParallelismPlugin | None = None,
        trn_config: TrainingNeuronConfig | None = None,
        zero_1: bool = False,
        autocast_backend: str = "xla",
        **kwargs: Any,
    ) -> None:
        if mp_plugin is not None and trn_config is not None:
            raise ValueError("mp_plugin and trn_config say the same: give one")
        self.mp_plugin = mp_plugin or trn_config or ModelParallelismPlugin()
        self.zero_1 = zero_1
        join(self.mp_plugin.tensor_parallel_size, self.mp_plugin.pipeline_parallel_size)
        note({"autocast_backend": autocast_backend}, {"autocast_backend": "xla"})
        super().__init__(*args, **kwargs)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Models are sharded first, so that the order of ``args`` is free."""
        for model in args:
            if isinstance(model, nn.Module):
                self.mp_plugin.parallelize_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        plain = getattr(optimizer, "optimizer", optimizer)
        return super().prepare_optimizer(over_dp(plain) if self.zero_1 else optimizer, device_placement)
