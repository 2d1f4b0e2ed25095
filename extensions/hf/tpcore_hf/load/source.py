"""The whole tensors of a sharded model, made one at a time for an engine that serves them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcore.runtime.context import current

from .gathered import Written, whole_entries
from .names import in_files


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The tensors that ``save_pretrained`` would write of ``model``, whole, one after the other.

    It has the two methods of vLLM's ``WeightSource`` (docs.vllm.ai, "Weight Transfer"): ``metadata()``, and an iterator
    of names and tensors, as often as one likes, with the values of that moment. Each rank holds one whole tensor at a
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
        return [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in self._tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, on the model's device. Collective: each rank takes all of them."""
        device = current().device
        for name, t in self._tensors().items():
            pieces = list(t.pieces())
            yield name, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(device)

    def _tensors(self) -> Mapping[str, Written]:
        model: Any = self.model
        if "peft" in sys.modules:  # no model has adapters before
            from ..adapters.merged import merged_state

            model, state, merges = merged_state(model)
        else:
            state, merges = model.state_dict(keep_vars=True), {}
        entries = whole_entries(model, state, set(), self.dtype, merges, everywhere=True)
        if not hasattr(model, "all_tied_weights_keys"):  # no model of transformers
            return entries
        return in_files(model, entries)  # an error is of the names, and the same on each rank
