"""Saving and loading by the signatures of NeuronX Distributed, in all its versions."""

from __future__ import annotations

import os
from typing import Any

import torch

from tpcore import checkpoint as files

__all__ = ["load", "save"]

StrPath = str | os.PathLike[str]


def save(
    state_dict: dict[Any, Any] | None = None,
    save_dir: StrPath | None = None,
    save_serially: bool = False,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
    *,
    async_save: bool = False,
    checkpoint: dict[Any, Any] | None = None,
    output_dir: StrPath | None = None,
    **options: Any,
) -> None:
    """``tpcore.checkpoint.save``. ``checkpoint`` and ``output_dir`` are other names of the first two arguments.
    ``save_xser`` has no effect: there is one format, whose tensors are streamed."""
    state = either("state_dict", state_dict, "checkpoint", checkpoint)
    where = either("save_dir", save_dir, "output_dir", output_dir)
    if async_save and save_serially:
        raise ValueError("async_save and save_serially: a save in the background keeps no order of ranks")
    options |= {"background": async_save, "in_turn": save_serially, "share_writes": not master_dp_only}
    files.save(state, where, dtype=torch.bfloat16 if down_cast_bf16 else None, **options)


def load(
    load_dir: StrPath | None = None,
    model: Any = None,
    model_key: str | None = "model",
    sharded: bool = True,
    strict: bool = True,
    *,
    chkpt_path: StrPath | None = None,
    model_or_optimizer: Any = None,
    load_xser: bool = False,
    master_dp_only: bool = True,
    weights_only: bool = True,
    **options: Any,
) -> Any:
    """``tpcore.checkpoint.load``. ``chkpt_path`` and ``model_or_optimizer`` are other names of the first two arguments.
    Files of ``load_xser=True`` are recognised, and the argument has no effect."""
    where = either("load_dir", load_dir, "chkpt_path", chkpt_path)
    if not isinstance(sharded, bool) or not isinstance(model_key, str | None):  # the order of later versions
        call = f"load(load_dir, model, {model_key!r}, {sharded!r})"
        raise TypeError(f"{call}: after model, give model_or_optimizer= and others by name")
    if not master_dp_only:
        raise ValueError("master_dp_only=False is not supported: there is one copy for all dp ranks")
    if not weights_only:
        raise ValueError("weights_only=False would let a file run code; everything is loaded without")
    if model is not None and model_or_optimizer is not None:
        raise ValueError("model and model_or_optimizer are two names of one argument: give one")
    target = model_or_optimizer if model is None else model
    return files.load(where, target, model_key=model_key, sharded=sharded, strict=strict, **options)


def either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of an argument that has two names. TypeError unless exactly one was given."""
    if (value is None) == (other is None):
        number = "both" if value is not None else "neither"
        raise TypeError(f"{name} and {other_name} are two names of one argument: give one, not {number}")
    return value if value is not None else other
