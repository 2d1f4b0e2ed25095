"""Refusals of calls that would give silently wrong results on a cut model; the error names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

from torch import nn

_PREPARED = "_is_accelerate_prepared"


@dataclass(frozen=True)
class RefusedByName:
    """The model's list of parameters for DistributedDataParallel to ignore: reading it raises the refusal.

    DistributedDataParallel's constructor reads it, and then copies rank 0's parameters to all ranks. The
    shapes match, so every rank would have the same part of the model, and training would go on.
    """

    model: str

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            f"DistributedDataParallel would copy rank 0's part of this {self.model} to ranks that hold other "
            "parts, and so would accelerate: leave the model as it is and call tpcore.reduce_gradients() "
            "before each optimizer step, or tpcore.optimizer_step()"
        )


@dataclass(frozen=True)
class RefusedByBool:
    """What accelerate asks a model before it places or wraps it, in training and in evaluation: an error.

    Its data loaders would give the ranks of one tp group different batches. Nothing else reads it.
    """

    model: str

    def __bool__(self) -> bool:
        raise ValueError(
            f"this {self.model} is cut over ranks, and accelerate, by which the Trainer of transformers "
            "works, would wrap it and give each rank other batches: use Trainer of "
            "tpcore.integrations.transformers, or Accelerator of tpcore.integrations.accelerate"
        )


@dataclass(frozen=True)
class RefusedAdapters:
    """The adapters of a cut model, which peft asks for before it adds one: an error.

    An adapter of a cut parameter would be made of this rank's part, and each rank's factors would learn by
    themselves. peft refuses modules that it does not know, but not every parameter of them.
    """

    model: str

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"an adapter that peft adds to this sharded {self.model} would see one rank's part of its "
            "parameters: add it by tpcore.integrations.peft.get_peft_model (or from_pretrained), or before "
            "tpcore.parallelize"
        )

    __setitem__ = __getitem__ = __iter__ = __contains__ = update


def _resize(model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"the vocabulary of this {type(model).__name__} is cut over ranks: call resize_token_embeddings "
        "before tpcore.parallelize"
    )


def guard(model: nn.Module) -> None:
    """Make DistributedDataParallel and ``resize_token_embeddings`` raise errors for ``model``."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = RefusedByName(type(model).__name__)
    model.__dict__[_PREPARED] = RefusedByBool(type(model).__name__)
    model.__dict__.setdefault("peft_config", RefusedAdapters(type(model).__name__))
    model.__dict__["resize_token_embeddings"] = MethodType(_resize, model)


@contextmanager
def permit_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, peft may add the first adapters; if it fails, the refusal is back."""
    configs = model.__dict__.pop("peft_config")
    if not isinstance(configs, RefusedAdapters):
        model.__dict__["peft_config"] = configs
    try:
        yield
    except BaseException:
        model.__dict__["peft_config"] = configs
        raise


def is_guarded(model: nn.Module) -> bool:
    """Whether ``model`` or a model inside is cut already."""
    return any("resize_token_embeddings" in vars(module) for module in model.modules())


def admit(model: nn.Module) -> None:
    """Let an accelerator have ``model`` that knows its mesh."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_PREPARED), RefusedByBool):
            del module.__dict__[_PREPARED]
