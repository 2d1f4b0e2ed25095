"""optimum-neuron's Trainer and Accelerator: they cut the model by their arguments, and save it in parts."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
import transformers
from torch import nn

from ...log import inform
from ...runtime.context import current
from ..accelerate import Accelerator
from ..accelerate.state import over_dp
from ..transformers import Trainer
from ..transformers.files import save_in_parts
from .options import ModelParallelismPlugin, TrainingNeuronConfig, join, note
from .training_args import NeuronTrainingArguments, Seq2SeqNeuronTrainingArguments

_AFTER_ARGS = list(inspect.signature(transformers.Trainer.__init__).parameters)[3:]


class NeuronTrainer(Trainer):
    """``tpcore.integrations.transformers.Trainer`` that cuts ``model`` as ``NeuronTrainingArguments`` say.

    The model may come from ``lazy_load_for_parallelism``. A checkpoint holds a cut model in parts, in
    ``tensor_parallel_shards``: ``tpcore checkpoint consolidate`` makes one model of them, which
    ``from_pretrained`` opens. Any mesh resumes from it. ``tokenizer``: the ``processing_class``, by the name
    that it had before transformers 5.
    """

    args: Any
    arguments: type[NeuronTrainingArguments] = NeuronTrainingArguments

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        args = self.arguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, self.arguments):
            kind, want = type(self).__name__, self.arguments.__name__
            raise TypeError(f"{kind} takes {want}, not {type(args).__name__}")
        if "tokenizer" in options:
            options["processing_class"] = options.pop("tokenizer")
        plugin = args.mp_plugin
        model = None if model is None else plugin.parallelize_model(model)
        if (make := options.get("model_init")) is not None:
            options["model_init"] = wraps(make)(lambda *args: plugin.parallelize_model(make(*args)))
        given = zip(_AFTER_ARGS, rest, strict=False)
        super().__init__(model, args=args, zero1=args.zero1_options, **dict(given), **options)
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
    """``tpcore.integrations.accelerate.Accelerator`` that cuts models as ``mp_plugin`` or ``trn_config`` says
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
        """Models are cut first, so that the order of ``args`` is free."""
        for model in args:
            if isinstance(model, nn.Module):
                self.mp_plugin.parallelize_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        known = getattr(optimizer, "optimizer", optimizer)
        return super().prepare_optimizer(over_dp(known) if self.zero_1 else optimizer, device_placement)
