"""The loss of a language model if each rank has the logits of its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import ColumnParallelLinear
from ..layers.loss import parallel_cross_entropy
from .dealt import SequenceLoss
from .source import asks_loss_function

READS_WHOLE_HEAD = "_tpcore_reads_whole_head"
"""The mark of a model of which a forward of TRL's gets the head's whole weight."""
IS_HEAD = "_tpcore_is_head"
"""The mark of a head of which the loss reads each rank's part."""
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


class VocabularyLoss:
    """``model.loss_function`` for a cut head: a parallel loss if the head's output stays in parts."""

    def __init__(self, head: ColumnParallelLinear, whole: Callable[..., Tensor], shift: bool) -> None:
        self._head, self._whole, self._shift = head, whole, shift

    def __call__(
        self,
        logits: Tensor,
        labels: Any = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Tensor:
        vocab = self._head.out_features
        if self._head.gather_output and logits.shape[-1] == vocab:  # not what a forward with shift_labels alone left
            vocab = vocab if vocab_size is None else vocab_size
            return self._whole(logits, labels, vocab, num_items_in_batch, **options)
        ignored, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
        if options.get("shift_labels") is not None:
            labels = options["shift_labels"]
        elif labels is not None and self._shift:
            labels = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if labels is None:
            raise ValueError("the loss over a cut vocabulary needs labels, or shift_labels")
        losses = parallel_cross_entropy(logits, labels, smoothing, ignored, vocab_size=vocab, group=self._head.tp)
        total: Tensor = losses.sum() / ((labels != ignored).sum() if num_items_in_batch is None else num_items_in_batch)
        return total


def cut_loss(model: nn.Module, head: ColumnParallelLinear) -> None:
    """Compute the loss from parts of the vocabulary if ``model`` calls ``self.loss_function``. With labels the logits
    stay parts until the loss is computed. The output's logits are whole in eval mode. In training mode they stay this
    rank's part: gathering them costs more than the loss."""
    head.__dict__[IS_HEAD] = True
    whole = getattr(model, "loss_function", None)
    shift = _SHIFTS.get(getattr(whole, "__name__", ""))
    if whole is not None and shift is not None and asks_loss_function(type(model).forward):
        model.loss_function = VocabularyLoss(head, whole, shift)  # type: ignore[assignment]
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)


def _head(model: nn.Module) -> ColumnParallelLinear | None:
    """The sharded head; None if a whole one was put in its place."""
    # from the model: after a deepcopy a hook that stored the head would have the original's
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, ColumnParallelLinear) else None


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("fused_lm_head") and not model.__dict__.get(READS_WHOLE_HEAD):
        raise ValueError(
            "TRL's loss multiplies by the weight of the head, of which each rank has a part: train this model with "
            "SFTTrainer or DPOTrainer of tpcore.integrations.trl"
        )
    head = _head(model)
    if head is not None:
        unscored = kwargs.get("labels") is None and kwargs.get("shift_labels") is None
        # a loss that was set since then reads all logits
        head.gather_output = unscored or not isinstance(model.loss_function, VocabularyLoss | SequenceLoss)


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    head = _head(model)
    if head is None or head.gather_output:
        return output
    head.gather_output = True
    if not model.training and isinstance(output, tuple):  # return_dict=False: losses, which have no dims, and logits
        at = next(i for i, t in enumerate(output) if t.ndim)
        return *output[:at], head.outputs(output[at]), *output[at + 1 :]
    if not model.training and isinstance(getattr(output, "logits", None), Tensor):
        output.logits = head.outputs(output.logits)
    return output
