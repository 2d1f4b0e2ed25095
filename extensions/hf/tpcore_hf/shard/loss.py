"""The loss of a language model if each rank has the logits of its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tpcore.layers import ColumnParallelLinear
from tpcore.layers.loss import parallel_cross_entropy

from ..plan.inputs import is_own
from .logits import Logits, keep_parts

READS_WHOLE_HEAD = "_tpcore_reads_whole_head"
"""The mark of a model of which a forward of TRL's gets the head's whole weight."""
IS_HEAD = "_tpcore_is_head"
"""The mark of a head of which the loss reads each rank's part."""


class VocabularyLoss:
    """``model.loss_function`` for a cut head: of the parts of logits that nobody has read, else ``whole``."""

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
        if not isinstance(logits, Logits) or logits.read is not None:
            vocab = vocab if vocab_size is None else vocab_size
            return self._whole(logits, labels, vocab, num_items_in_batch, **options)
        ignored, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
        if options.get("shift_labels") is not None:
            labels = options["shift_labels"]
        elif labels is not None and self._shift:
            labels = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if labels is None:
            raise ValueError("the loss over a cut vocabulary needs labels, or shift_labels")
        losses = parallel_cross_entropy(logits.part, labels, smoothing, ignored, vocab_size=vocab, group=self._head.tp)
        total: Tensor = losses.sum() / ((labels != ignored).sum() if num_items_in_batch is None else num_items_in_batch)
        return total


def cut_loss(model: nn.Module, head: ColumnParallelLinear) -> None:
    """Let the logits of a training step stay parts until they are read, and the loss be computed from these. A forward
    that is not transformers' own may read them on some of the ranks: there they are gathered."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    head.__dict__[IS_HEAD] = True
    model.register_forward_pre_hook(_before, with_kwargs=True)
    if is_own(model):
        head.gather_output = False
        head.register_forward_hook(keep_parts)
        whole = getattr(model, "loss_function", None)
        if whole is ForCausalLMLoss or whole is ForMaskedLMLoss:
            shift = whole is ForCausalLMLoss
            model.loss_function = VocabularyLoss(head, whole, shift)  # type: ignore[assignment]


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("fused_lm_head") and not model.__dict__.get(READS_WHOLE_HEAD):
        raise ValueError(
            "TRL's loss multiplies by the weight of the head, of which each rank has a part: train this model with "
            "SFTTrainer or DPOTrainer of tpcore_hf.trl"
        )
