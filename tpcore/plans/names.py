"""The mapping between tensor names in files and in memory, which calls transformers' own mapping.

transformers 5 renamed modules of many families (the head of GPT-NeoX, every layer of ViT) and kept the names
in files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import CheckpointError


def names_in_memory(model: Any, stored: Iterable[str], where: str) -> dict[str, str]:
    """The model's name for each name in a file, without those that transformers ignores when it reads.

    CheckpointError for tensors that would have to be merged or split: a rank's part is no slice of a file.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = dict.fromkeys(model.state_dict(keep_vars=True))
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    found: dict[str, str] = {}
    for name in stored:
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converter is not None and renamed not in found.values() and renamed != name:
            raise CheckpointError(
                f"{where}: {name!r} is merged or split on the way to {renamed!r}, of which no rank could "
                "read its part: load the whole model, then parallelize it"
            )
        if renamed in own or not any(pattern.search(renamed) for pattern in ignored):
            found[name] = renamed
    return found


def names_in_files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The name in files for each name of the model. Only names are mapped, no values."""
    from transformers.core_model_loading import revert_weight_conversion

    order = list(names)
    # each tensor's number of entries identifies it after the renaming
    meta = {name: torch.empty((i + 1,), device="meta") for i, name in enumerate(order)}
    try:
        answer = revert_weight_conversion(model, dict(meta))
    except Exception as e:
        raise CheckpointError(
            f"{type(model).__name__} is stored merged or split, not by renaming: {e}"
        ) from e
    found = {order[t.shape[0] - 1]: name for name, t in answer.items() if t.ndim == 1}
    if found.keys() != set(order) or len(answer) != len(order):
        raise CheckpointError(
            f"{type(model).__name__} is stored with tensors merged or split, which is not done one by one: "
            "model.save_pretrained(dir, state_dict=tpcore.full_state_dict(model)) holds all of it in memory"
        )
    return found
