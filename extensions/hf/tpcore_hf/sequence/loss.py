"""The loss of a whole batch, of which each rank of cp scores its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm

from .. import private
from ..plan.inputs import OURS
from ..shard.logits import Logits

IGNORED = -100
"""The label of tokens that no loss counts: transformers' own."""
DOCUMENTS = "tpcore_documents"


def counted(labels: Tensor, comm: Comm) -> Tensor:
    """The number of labels that count, of all ranks."""
    return comm.all_reduce((labels != IGNORED).sum().reshape(1)).squeeze(0)


def total(part: Tensor, comm: Comm) -> Tensor:
    """The sum over ranks, on each, as a loss: backward sums the gradients of all ranks' losses."""
    # sum: no view, which a Trainer could not change in place
    return ops.copy(ops.reduce(part.reshape(1), comm), comm).sum()


class SequenceLoss:
    """``model.loss_function`` of the whole batch, of labels that are shifted and cut already."""

    def __init__(self, inner: Callable[..., Tensor], comm: Comm) -> None:
        self._inner, self._comm = inner, comm
        # of which it is known that it counts: others are tried once
        self._sums = private.of_transformers(inner) or str(getattr(inner, "__module__", "")).startswith(OURS)

    def __call__(
        self,
        logits: Tensor,
        labels: Any = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Tensor:
        labels = labels if options.get("shift_labels") is None else options["shift_labels"]
        if labels is not None and isinstance(logits, Logits) and logits.shape[:-1] != labels.shape:
            logits = logits.part  # all ranks' tokens, beside this rank's labels
        options.pop(DOCUMENTS, None)
        if labels is None:
            raise ValueError("a loss needs labels, or shift_labels")
        count = counted(labels, self._comm) if num_items_in_batch is None else num_items_in_batch
        options |= {"vocab_size": vocab_size, "shift_labels": labels}
        part = self._inner(logits, labels=labels, num_items_in_batch=count, **options)
        if not (self._sums or part.is_meta or torch.compiler.is_compiling()):
            other = {"labels": torch.full_like(labels, IGNORED), "num_items_in_batch": 2 * count}
            with torch.no_grad():
                self._check_sums(part, 2 * self._inner(logits, **other, **options))
        return total(part, self._comm)

    def _check_sums(self, part: Tensor, again: Tensor) -> None:
        """Once there is a loss: ValueError on all ranks unless other labels, and twice the count, gave half of it."""
        differs = ~torch.isclose(part, again, rtol=1e-2, equal_nan=True)  # rtol: of half precision
        flags = torch.stack([differs, part.nan_to_num() != 0]).to(torch.int64).view(2)
        refused, self._sums = (bool(flag) for flag in self._comm.all_reduce(flags, "max").tolist())
        if refused:
            name = getattr(self._inner, "__name__", type(self._inner).__name__)
            raise ValueError(
                f"loss_function {name} with context parallelism: each of {self._comm.size} cp ranks scores its "
                "own tokens and the parts are added, so it must score shift_labels (not labels, which it would shift) "
                "and divide their sum by num_items_in_batch"
            )
