"""TRL's trainers for sharded models: its classes, above which stands the ``Trainer`` of this library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments, set_seed

from tpcore.errors import extra
from tpcore.layers import ColumnParallelLinear

from .shard.loss import READS_WHOLE_HEAD
from .trainer import Trainer

with extra("trl", "tpcore_hf.trl"):
    import trl as _trl  # type: ignore[import-not-found, unused-ignore]

__all__ = ["DPOTrainer", "SFTConfig", "SFTTrainer"]

trl: Any = _trl  # which loads its classes by name
SFTConfig = trl.SFTConfig


@dataclass(frozen=True)
class _WholeHead:
    """The head as TRL's loss reads it: the whole weight, of which each rank's part gets its gradient."""

    part: ColumnParallelLinear

    def _whole(self, t: Tensor) -> Tensor:
        return self.part.features.gathered(t, self.part.tp)

    @property
    def weight(self) -> Tensor:
        return self._whole(self.part.weight.t()).t()

    @property
    def bias(self) -> Tensor | None:
        return None if self.part.bias is None else self._whole(self.part.bias)


def _with_whole_head(model: Any) -> None:
    """TRL's forward of ``model``, which multiplies by the weight of the head itself, gets all of it.

    Every rank then computes the whole loss. ValueError for a head that gets parts of the tokens.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, forward = model.get_output_embeddings(), model.forward
    if not isinstance(head, ColumnParallelLinear):
        return
    if head.input_is_copied or head.sequence_dim is not None:
        raise ValueError("TRL's loss reads all tokens: leave out sequence_parallel=True in tpcore.parallelize")

    def whole(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs)
        model.get_output_embeddings = lambda: _WholeHead(head)
        try:
            return forward(*args, fused_lm_head=True, **kwargs)
        finally:
            del model.get_output_embeddings

    model.forward = whole
    model.__dict__[READS_WHOLE_HEAD] = True


class _Sharded(Trainer):
    """What TRL's trainers have in common."""

    def __init__(self, model: Any, *, args: Any = None, peft_config: Any = None, **kwargs: Any) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"{type(self).__name__} takes the model that tpcore.parallelize returns, not {model!r}")
        if peft_config is not None:
            from .peft import get_peft_model

            set_seed(TrainingArguments.seed if args is None else args.seed)  # as TRL does before it calls peft's
            model = get_peft_model(model, peft_config)
        super().__init__(model, args=args, **kwargs)
        for each in (self.model, getattr(self, "ref_model", None)):
            if each is not None:
                _with_whole_head(each)


class SFTTrainer(_Sharded, trl.SFTTrainer):  # type: ignore[misc, unused-ignore]
    """``trl.SFTTrainer`` for a model of ``tpcore.parallelize``, with its arguments, and ``zero1`` of ``Trainer``."""


class DPOTrainer(_Sharded, trl.DPOTrainer):  # type: ignore[misc, unused-ignore]
    """``trl.DPOTrainer``, in the same way. ``ref_model`` is sharded too, or left out with adapters."""
