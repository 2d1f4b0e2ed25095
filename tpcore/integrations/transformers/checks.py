"""Refusal of training arguments and models with which a Trainer on a mesh would be wrong."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...models.guards import is_guarded
from ...runtime.context import current
from .files import is_cut

_REFUSED = {
    "train_sampling_strategy": ("batch_rebalance", "it deals batches to all ranks of the world"),
    "eval_use_gather_object": (True, "it gathers from ranks that hold the same batch"),
    "save_on_each_node": (True, "rank 0 writes the whole model: use a directory that all hosts see"),
    "torch_compile_backend": ("openxla", "it compiles one replica alone"),
}
_OTHERS = ("fsdp", "deepspeed")
"""Arguments that name another library of sharding. accelerate ignores the first on CPUs."""


def check_arguments(args: Any) -> None:
    """ValueError for training arguments that take each process for a data-parallel rank."""
    mesh = current().mesh
    for name in _OTHERS if mesh.size > 1 else ():
        if asked := getattr(args, name, None):
            raise ValueError(
                f"TrainingArguments({name}={asked!r}) on the mesh {dict(mesh.axes)}: two libraries would cut "
                "one model; drop it, and ask for zero1=True to cut the optimizer's state"
            )
    if mesh.size == current().batch.size:
        return
    for name, (value, why) in _REFUSED.items():
        if getattr(args, name, None) == value:
            raise ValueError(f"TrainingArguments({name}={value!r}) on the mesh {dict(mesh.axes)}: {why}")


def check_cut(model: nn.Module) -> None:
    """ValueError for a model of which all ranks of a tp group would train the same copy."""
    mesh = current().mesh
    if mesh.size != current().batch.size and not (is_cut(model) or is_guarded(model)):
        raise ValueError(
            f"this {type(model).__name__} is whole on every rank of the mesh {dict(mesh.axes)}: call "
            "tpcore.parallelize(model) before the Trainer, or tpcore.init with tp=1"
        )
