"""peft's functions for models that ``tpcore.parallelize`` has sharded."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from torch import nn

from tpcore.errors import extra

from .shard.refusals import is_guarded, permit_adapters

with extra("peft", "adapters"):
    import peft

from .adapters import sharded as adapters

__all__ = ["from_pretrained", "get_peft_model"]


def get_peft_model(model: nn.Module, peft_config: peft.PeftConfig, *args: Any, **options: Any) -> Any:
    """``peft.get_peft_model``, for a model that is sharded or whole: a ``PeftModel``, whose adapters are sharded like
    the layers beside them, with the values that one process draws from the same seed.

    ``save_pretrained`` of it is collective, and writes peft's files of the whole adapters. ValueError for kinds of
    adapters and options that a sharded layer lacks, such as DoRA.
    """
    with permit_adapters(model) if is_guarded(model) else nullcontext():
        adapters.check_targets(model, adapters.prepared(peft_config))
        return adapters.bound(peft.get_peft_model(model, peft_config, *args, **options))


def from_pretrained(
    model: nn.Module,
    model_id: str | os.PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
    config: peft.PeftConfig | None = None,
    **options: Any,
) -> Any:
    """``peft.PeftModel.from_pretrained``, for a model that is sharded or whole: the files' adapters on ``model``."""
    with permit_adapters(model) if is_guarded(model) else nullcontext():
        path = os.fspath(model_id)
        place = {key: options[key] for key in ("subfolder", "revision", "cache_dir", "token") if key in options}
        config = config or peft.PeftConfig.from_pretrained(path, **place)
        config.inference_mode = not is_trainable
        adapters.check_targets(model, adapters.prepared(config))
        open_files: Any = peft.PeftModel.from_pretrained
        with adapters.whole_layers(model):
            return adapters.bound(open_files(model, path, adapter_name, is_trainable, config, **options))
