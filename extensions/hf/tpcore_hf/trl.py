"""TRL's trainers for sharded models: its classes, above which stands the ``Trainer`` of this library."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tpcore.errors import extra

with extra("trl", "tpcore_hf.trl"):
    import accelerate.utils
    import trl as _trl  # type: ignore[import-not-found, unused-ignore]
    from transformers import TrainingArguments, set_seed
    from trl.trainer import grpo_trainer, rloo_trainer  # type: ignore[import-not-found, unused-ignore]

from tpcore.layers import ColumnParallelLinear
from tpcore.runtime.consensus import gather as gather_values
from tpcore.runtime.context import current, is_initialized

from . import parallelize
from .accelerate import Accelerator
from .shard.logits import READS_WHOLE_HEAD
from .trainer import Trainer

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTConfig", "SFTTrainer"]

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
    head, forward = getattr(model, "get_output_embeddings", lambda: None)(), model.forward
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


class RewardTrainer(_Sharded, trl.RewardTrainer):  # type: ignore[misc, unused-ignore]
    """``trl.RewardTrainer``, in the same way, for a sharded model with one label."""


class KTOTrainer(_Sharded, trl.KTOTrainer):  # type: ignore[misc, unused-ignore]
    """``trl.KTOTrainer``, in the same way. As in TRL the pairs of its KL term are those of a rank's batch, and depend
    on the number of data-parallel ranks."""


def gather(tensor: Tensor) -> Any:
    """accelerate's function, which TRL calls by itself: over the ranks that have other examples, if there is a mesh."""
    return Accelerator.gather(None, tensor) if is_initialized() else accelerate.utils.gather(tensor)  # type: ignore[arg-type]


def gather_object(values: list[Any]) -> list[Any]:
    """The same of lists."""
    if not is_initialized():
        return list(accelerate.utils.gather_object(values))
    return [*chain.from_iterable(gather_values(values, current().batch))]


def create_model_from_path(path: Any, *args: Any, **kwargs: Any) -> Any:
    """TRL's function, by which it loads the weights before training as the reference of a KL term: sharded too."""
    model = trl.trainer.utils.create_model_from_path(path, *args, **kwargs)
    return parallelize(model) if is_initialized() and current().mesh.axes.get("tp", 1) > 1 else model


def _on_mesh(module: ModuleType) -> None:
    for function in (gather, gather_object, create_model_from_path):
        if not hasattr(module, function.__name__):
            raise ImportError(
                f"{module.__name__} of trl {trl.__version__} lacks {function.__name__}, which tpcore sets"
            )
        setattr(module, function.__name__, function)


for _module in (grpo_trainer, rloo_trainer):
    _on_mesh(_module)


class _Generating(_Sharded):
    """What the trainers that generate have in common. Ranks of one tp group sample the same tokens."""

    def __init__(self, model: Any, *more: Any, args: Any, **kwargs: Any) -> None:
        # the configuration counts each process for a batch of its own
        args = copy(args)
        ranks = current().batch.size
        args.generation_batch_size = args.per_device_train_batch_size * ranks * args.steps_per_generation
        if args.generation_batch_size % args.num_generations:
            raise ValueError(
                f"{args.generation_batch_size} completions, of per_device_train_batch_size="
                f"{args.per_device_train_batch_size} on {ranks} data-parallel ranks times steps_per_generation="
                f"{args.steps_per_generation}, are no whole groups of num_generations={args.num_generations}"
            )
        super().__init__(model, *more, args=args, **kwargs)

    def get_train_dataloader(self) -> Any:
        ctx = current()
        if ctx.reproducible is not None and ctx.batch.size > 1:
            raise ValueError(
                f"reproducible={ctx.reproducible}: {type(self).__name__} compares samples of one prompt on all "
                f"{ctx.batch.size} dp ranks, which draw others than one would: take dp=1"
            )
        return super().get_train_dataloader()


class GRPOTrainer(_Generating, trl.GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """``trl.GRPOTrainer``, in the same way. The reference of a KL term (``beta``) is loaded as by TRL, and sharded."""


class RLOOTrainer(_Generating, trl.RLOOTrainer):  # type: ignore[misc, unused-ignore]
    """``trl.RLOOTrainer``, in the same way."""
