"""Refusals of calls that would give silently wrong results on a cut model; the error names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

from torch import nn


@dataclass(frozen=True)
class Refusal:
    """A value in a model's ``__dict__`` under a name that another library reads: reading it raises the error."""

    message: str

    def __bool__(self) -> NoReturn:
        raise ValueError(self.message)

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(self.message)

    __iter__ = __contains__ = __getitem__ = __setitem__ = update


_PREPARED, _ADAPTERS = "_is_accelerate_prepared", "peft_config"
_MESSAGES = {
    # asked by accelerate before it places or wraps a model, in training and in evaluation. Its data loaders would give
    # the ranks of one tp group other batches
    _PREPARED: "this {} is sharded over ranks, and accelerate, by which the Trainer of transformers works, would "
    "wrap it and give each rank other batches: use Trainer of tpcore_hf.trainer, or Accelerator of "
    "tpcore_hf.accelerate",
    # asked by peft before it adds an adapter, which would be made of this rank's part, and each rank's factors would
    # learn by themselves. peft refuses modules that it does not know, but not every parameter of them
    _ADAPTERS: "an adapter that peft adds to this sharded {} would see one rank's part of its parameters: add it by "
    "tpcore_hf.peft.get_peft_model (or from_pretrained), or before tpcore.parallelize",
}


def _resize(model: nn.Module, *_: Any, **__: Any) -> NoReturn:
    reason = f"the vocabulary of this {type(model).__name__} is sharded over ranks"
    raise ValueError(f"{reason}: call resize_token_embeddings before tpcore.parallelize")


def refuse_replicas(replicas: nn.Module, module: nn.Module, *_: Any, **__: Any) -> None:
    """``DistributedDataParallel(module)``, which copies the first rank's parameters to all: the shapes match, so every
    rank would have the same part of the model, and training would go on."""
    if is_guarded(module):
        raise ValueError(
            f"{type(replicas).__name__} would copy the first rank's part of this {type(module).__name__} to ranks that "
            "hold other parts, and so would accelerate: leave the model as it is and call tpcore.reduce_gradients() "
            "before each optimizer step, or tpcore.optimizer_step()"
        )


def guard(model: nn.Module) -> None:
    """Let ``model`` refuse what other libraries would do to it, and ``resize_token_embeddings``."""
    for name, message in _MESSAGES.items():
        if name != _ADAPTERS or name not in model.__dict__:  # a model that has adapters keeps them
            model.__dict__[name] = Refusal(message.format(type(model).__name__))
    model.__dict__["resize_token_embeddings"] = MethodType(_resize, model)


@contextmanager
def permit_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, peft may add the first adapters; if it fails, the refusal is back."""
    configs = model.__dict__.pop(_ADAPTERS)
    if not isinstance(configs, Refusal):
        model.__dict__[_ADAPTERS] = configs
    try:
        yield
    except BaseException:
        model.__dict__[_ADAPTERS] = configs
        raise


def is_guarded(model: nn.Module) -> bool:
    """Whether ``model`` or a model inside is sharded already."""
    return any("resize_token_embeddings" in vars(module) for module in model.modules())


def admit(model: nn.Module) -> None:
    """Let an accelerator have ``model`` that knows its mesh."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_PREPARED), Refusal):
            del module.__dict__[_PREPARED]
