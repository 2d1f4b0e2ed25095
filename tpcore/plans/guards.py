"""What would be wrong on a cut model without a word: it is refused, and the error says what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

from torch import nn


@dataclass(frozen=True)
class RefusedByName:
    """Parameters that DistributedDataParallel is to leave out, which it asks a model for: an error.

    Its constructor copies rank 0's parameters to all ranks. Shapes match, so that every rank would then hold
    the same part of the model, and train.
    """

    model: str

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            f"DistributedDataParallel would copy rank 0's part of this {self.model} to ranks that hold other "
            "parts, and so would accelerate: leave the model as it is and call tpcore.reduce_gradients() "
            "before each optimizer step, or tpcore.optimizer_step()"
        )


def _resize(model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"the vocabulary of this {type(model).__name__} is cut over ranks: call resize_token_embeddings "
        "before tpcore.parallelize"
    )


def guard(model: nn.Module) -> None:
    """Refuse what a cut model cannot do."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = RefusedByName(type(model).__name__)
    model.__dict__["resize_token_embeddings"] = MethodType(_resize, model)
