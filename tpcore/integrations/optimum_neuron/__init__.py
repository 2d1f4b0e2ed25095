"""The names by which training scripts know optimum-neuron, over tpcore's own parts."""

from .accelerate import NeuronAccelerator
from .distributed import (
    Parallelizer,
    ParallelizersManager,
    consolidate_model_parallel_checkpoints_to_unified_checkpoint,
    lazy_load_for_parallelism,
    make_optimizer_constructor_lazy,
)
from .options import ModelParallelismPlugin, TrainingNeuronConfig
from .trainers import NeuronTrainer
from .training_args import NeuronHfArgumentParser, NeuronTrainingArguments

__all__ = [
    "ModelParallelismPlugin",
    "NeuronAccelerator",
    "NeuronHfArgumentParser",
    "NeuronTrainer",
    "NeuronTrainingArguments",
    "Parallelizer",
    "ParallelizersManager",
    "TrainingNeuronConfig",
    "consolidate_model_parallel_checkpoints_to_unified_checkpoint",
    "lazy_load_for_parallelism",
    "make_optimizer_constructor_lazy",
]
