"""optimum-neuron's supervised fine-tuning, over TRL's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpcore_hf.trl import SFTConfig, SFTTrainer

from .trainers import NeuronTrainer, NeuronTrainingArguments

__all__ = ["NeuronSFTConfig", "NeuronSFTTrainer"]


@dataclass
class NeuronSFTConfig(NeuronTrainingArguments, SFTConfig):  # type: ignore[misc, unused-ignore]
    """``trl.SFTConfig`` with the flags of optimum-neuron. ``max_seq_length``: ``max_length``, by its older name."""

    max_seq_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_seq_length is not None:
            self.max_length = self.max_seq_length
        super().__post_init__()


class NeuronSFTTrainer(NeuronTrainer, SFTTrainer):
    """``tpcore_hf.trl.SFTTrainer`` that shards ``model`` as ``NeuronSFTConfig`` says."""

    arguments: Any = NeuronSFTConfig
