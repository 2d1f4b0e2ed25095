"""The names by which training scripts know optimum-neuron, over tpcore's own parts."""

from ...errors import extra

with extra("trainer", __name__):
    from .accelerate import NeuronAccelerator
    from .distributed import (
        Parallelizer,
        ParallelizersManager,
        consolidate_model_parallel_checkpoints_to_unified_checkpoint,
        lazy_load_for_parallelism,
        make_optimizer_constructor_lazy,
    )
    from .notes import send_example_telemetry
    from .options import ModelParallelismPlugin, TrainingNeuronConfig
    from .trainers import NeuronTrainer, Seq2SeqNeuronTrainer
    from .training_args import NeuronHfArgumentParser, NeuronTrainingArguments, Seq2SeqNeuronTrainingArguments

__all__ = [
    "ModelParallelismPlugin",
    "NeuronAccelerator",
    "NeuronHfArgumentParser",
    "NeuronTrainer",
    "NeuronTrainingArguments",
    "Parallelizer",
    "ParallelizersManager",
    "Seq2SeqNeuronTrainer",
    "Seq2SeqNeuronTrainingArguments",
    "TrainingNeuronConfig",
    "consolidate_model_parallel_checkpoints_to_unified_checkpoint",
    "lazy_load_for_parallelism",
    "make_optimizer_constructor_lazy",
    "send_example_telemetry",
]
