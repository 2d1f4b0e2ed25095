"""The names of a model's tensors in files, by transformers' own mapping.

transformers 5 renamed modules of many families (the head of GPT-NeoX, every layer of ViT) and kept the names
in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..checkpoint.storage.tensorfile import Writable
from ..errors import CheckpointError

Source = TypeVar("Source", bound=Writable)


@dataclass(frozen=True)
class Split(Generic[Source]):
    """One of the tensors that files have of a ``source``, which is made when the first of them is written."""

    source: Source
    like: Tensor
    name: str
    values: dict[str, Tensor]
    split: Callable[[Tensor], dict[str, Tensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def pieces(self) -> Iterator[Tensor]:
        if self.name not in self.values:
            pieces = list(self.source.pieces())
            self.values.update(self.split(pieces[0] if len(pieces) == 1 else torch.cat(pieces)))
        yield self.values.pop(self.name).contiguous()


def in_files(model: Any, tensors: Mapping[str, Source]) -> dict[str, Source | Split[Source]]:
    """What files have of ``tensors``, which are named as in the model: by names in files."""
    with suppress(CheckpointError):
        names = names_in_files(model, tensors)
        return {names[name]: t for name, t in tensors.items()}
    values: dict[str, Tensor] = {}
    stored: dict[str, Source | Split[Source]] = {}
    for name, source in tensors.items():
        parts = stored_as(model, name, torch.empty(source.shape, dtype=source.dtype, device="meta"))
        split = partial(stored_as, model, name)
        stored |= {part: Split(source, like, part, values, split) for part, like in parts.items()}
    return stored


def stored_as(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What files have of one tensor of the model, by names in files: experts, for example, each by itself.

    CheckpointError if files have this tensor merged with others.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        answer: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    except Exception as e:
        raise CheckpointError(
            f"{type(model).__name__} is stored with {name} merged with others, which is not done one by one: model."
            f"save_pretrained(dir, state_dict=tpcore.models.full_state_dict(model)) holds all of it in memory: {e}"
        ) from e
    return answer


def names_in_files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The name in files for each name of the model. Only names are mapped, no values."""
    from transformers.core_model_loading import revert_weight_conversion

    order = list(names)
    # each tensor's number of entries identifies it after the renaming
    meta = {name: torch.empty((i + 1,), device="meta") for i, name in enumerate(order)}
    try:
        answer = revert_weight_conversion(model, dict(meta))
    except Exception as e:
        raise CheckpointError(f"{type(model).__name__} is stored merged or split, not by renaming: {e}") from e
    found = {order[t.shape[0] - 1]: name for name, t in answer.items() if t.ndim == 1}
    if found.keys() != set(order) or len(answer) != len(order):
        raise CheckpointError(f"{type(model).__name__} is stored with tensors merged or split, not by renaming")
    return found
