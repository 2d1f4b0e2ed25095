"""Adapters of peft merged into copies of the tensors that they adapt, while the model keeps both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor

from ..load.gathered import Merge


def merged_state(adapted: Any) -> tuple[Any, dict[str, Tensor], dict[str, Merge]]:
    """The model of transformers in ``adapted``; its tensors by their names without adapters; and by name the context
    in which a tensor is what the model computes with: the active adapters are in it, and no others."""
    model: Any = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    state, merges = model.state_dict(keep_vars=True), dict[str, Merge]()
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, BaseTunerLayer | ModulesToSaveWrapper):
            continue
        of_layer = {key: state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
        active = [] if layer.disable_adapters else layer.active_adapters
        if isinstance(layer, BaseTunerLayer):
            inner = "base_layer"
        else:
            inner = next((f"modules_to_save.{a}" for a in active if a in layer.modules_to_save), "original_module")
        for key, t in of_layer.items():
            if key.startswith(prefix := f"{name}.{inner}."):
                plain = f"{name}.{key.removeprefix(prefix)}"
                state[plain] = t
                if isinstance(layer, BaseTunerLayer) and (active or layer.merged):
                    merges[plain] = partial(_merged, layer)
    return model, state, merges


@contextmanager
def _merged(layer: Any) -> Iterator[None]:
    """Inside, the adapters that ``layer`` computes with are merged into copies of its tensors, by peft: none where they
    are disabled, and those that have been merged before where there are such."""
    own = {p: p.data for p in layer.get_base_layer().parameters(recurse=False)}
    merged = list(layer.merged_adapters)
    try:
        for p, data in own.items():
            p.data = data.clone()
        if not layer.disable_adapters and not merged:
            layer.merge()
        elif layer.disable_adapters and merged:
            layer.unmerge()
        yield
    finally:
        for p, data in own.items():
            p.data = data
        layer.merged_adapters[:] = merged
