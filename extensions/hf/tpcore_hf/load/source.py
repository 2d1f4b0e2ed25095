"""The whole tensors of a sharded model, made one at a time for an engine that serves them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcore.runtime.context import current

from .gathered import NO_MERGES, Merge, Written, whole_entries
from .names import in_files


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The tensors that ``save_pretrained`` would write of ``model``, whole, one after the other.

    ``metadata()`` tells them, and an iterator gives names and tensors, as often as one likes, with the values of that
    moment; ``tpcore_hf.vllm`` has the same as vLLM's own class. Each rank holds one whole tensor at a
    time; of experts that files have apart, those of one layer.

    Args:
        model: of transformers or of tpcore's layers, on any mesh. Adapters of a ``PeftModel`` are merged on the way,
            and the model stays as it is.
        dtype: of the floating tensors, converted before they are gathered; by default the model's.

    Raises:
        CheckpointError: files have a tensor merged with others.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.dtype = dtype

    def metadata(self) -> list[TensorInfo]:
        """Name, dtype and whole shape of each tensor, in the order of the iterator. Nothing is gathered. Collective
        over pipeline stages."""
        return [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in self.tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, on the model's device. Collective: each rank takes all of them."""
        device = current().device
        for name, t in self.tensors().items():
            pieces = list(t.pieces())
            yield name, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(device)

    def tensors(self) -> Mapping[str, Written]:
        """By their names in files, gathered when they are asked for their pieces. Collective over pipeline stages."""
        model, state, merges = state_of(self.model)
        entries = whole_entries(model, state, set(), self.dtype, merges, everywhere=True)
        if not hasattr(model, "all_tied_weights_keys"):  # no model of transformers
            return entries
        return in_files(model, entries)  # an error is of the names, and the same on each rank


def state_of(model: Any) -> tuple[Any, dict[str, Tensor], Mapping[str, Merge]]:
    """The model of transformers in ``model``, its tensors by their names without adapters, and adapters to merge."""
    if "peft" in sys.modules:  # no model has adapters before
        from ..adapters.merged import merged_state

        return merged_state(model)
    return model, model.state_dict(keep_vars=True), NO_MERGES
