"""The names of a model's tensors in files, by transformers' own mapping.

transformers 5 renamed modules of many families (the head of GPT-NeoX, every layer of ViT) and kept the names
in files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError


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
