"""optimum-neuron's Trainer: cuts the model by its arguments, and saves it in parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import transformers

from ..transformers import Trainer
from ..transformers.files import save_in_parts
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
        if options.get("model_init") is not None:
            options["model_init"] = _cut_after(options["model_init"], plugin.parallelize_model)
        given = zip(_AFTER_ARGS, rest, strict=False)
        super().__init__(model, args=args, zero1=args.zero1_options, **dict(given), **options)

    def save_weights(self, where: str) -> None:
        if isinstance(getattr(self.model, "peft_config", None), dict):
            super().save_weights(where)  # adapters are small: peft's files
        else:
            save_in_parts(self.model, where, in_background=self.args.async_save)


class Seq2SeqNeuronTrainer(NeuronTrainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, which can evaluate by generating, with what ``NeuronTrainer`` adds."""

    arguments = Seq2SeqNeuronTrainingArguments


def _cut_after(make: Callable[..., Any], cut: Callable[[Any], Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any) -> Any:
        return cut(make(*args))

    return made
