"""Conversion of a plain module to this rank's part of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .module import ParallelModule

Cut = TypeVar("Cut", bound=ParallelModule)


def checked_plain(plain: nn.Module, kind: type[nn.Module], layer: type[nn.Module]) -> Any:
    """``plain``, if it computes what ``kind`` does. ValueError for another module, and for a subclass with
    its own forward (an embedding that scales its output), which a replacement would silently lose."""
    if not isinstance(plain, kind):
        raise ValueError(f"{layer.__name__}.from_plain takes a torch.nn.{kind.__name__}, not {type(plain).__name__}")
    if type(plain).forward is not kind.forward:
        raise ValueError(
            f"{layer.__name__}.from_plain: {type(plain).__name__} has a forward of its own, which would be "
            f"lost; replace its torch.nn.{kind.__name__} inside, or write a layer for it"
        )
    return plain


def filled(layer: Cut, plain: nn.Module) -> Cut:
    """``layer``, which is on meta, with this rank's part of the parameters of ``plain``."""
    mine, theirs = set(layer.shard_specs), {name for name, _ in plain.named_parameters(recurse=False)}
    if mine != theirs:  # a parametrized weight, for example, has other names
        raise ValueError(
            f"{type(layer).__name__}.from_plain: {type(plain).__name__} has the parameters {sorted(theirs)}, "
            f"not {sorted(mine)}"
        )
    for name, spec in layer.shard_specs.items():
        whole = plain.get_parameter(name)
        if tuple(whole.shape) != spec.shape:
            raise ValueError(
                f"{type(layer).__name__}.from_plain: {name} of shape {tuple(whole.shape)}, not {spec.shape}"
            )
        part = nn.Parameter(_part(layer, name, whole.detach()), requires_grad=whole.requires_grad)
        layer.register_parameter(name, part)
    return layer.train(plain.training)


def become_part(p: nn.Parameter, part: Tensor) -> None:
    """Let ``p`` have this rank's part, and stay the same object: an optimizer may have it."""
    if p.grad is not None and p.shape != part.shape:
        raise ValueError("a parameter has a gradient of its whole: call model.zero_grad() before parallelize")
    p.data = part


def keeping(layer: Cut, plain: nn.Module) -> Cut:
    """``layer`` with the Parameters of ``plain``, of which it has the parts."""
    for name, p in plain.named_parameters():
        become_part(p, layer.get_parameter(name).data)
        owner, _, leaf = name.rpartition(".")
        layer.get_submodule(owner).register_parameter(leaf, p)
    return layer


def _part(layer: ParallelModule, name: str, whole: Tensor) -> Tensor:
    if whole.is_meta:
        return torch.empty(layer.sharding_of(name).local_shape, dtype=whole.dtype, device="meta")
    # a lazy device would record this rank's slice, and the ranks would have different programs
    near = whole if layer.tp.eager else whole.cpu()
    return layer.part_of(name, near).to(whole.device)
