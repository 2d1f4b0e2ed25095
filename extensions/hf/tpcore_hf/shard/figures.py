"""Figures about a sharded model, as transformers and peft count them: of the whole, not of this rank's part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.layers import ColumnParallelLinear, ParallelEmbedding
from tpcore.layers.sharding import sharding
from tpcore.train.pipeline import PipelinedLayers

from ..plan.inputs import is_own
from ..plan.rules import wildcard

_PARAMETERS = nn.Module.named_parameters
_FIGURES = ("num_parameters", "get_memory_footprint", "get_nb_trainable_parameters")


def count_whole(model: nn.Module) -> None:
    """Let the methods of ``model`` that count parameters and bytes count those of all ranks."""
    for name in _FIGURES:
        if (method := getattr(type(model), name, None)) is not None:
            model.__dict__[name] = MethodType(partial(_counted, method), model)


def parameter_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Of a model of any kind, what the loop of transformers' Trainer prints."""
    whole = (t for _, t in _named(nn.Module.named_parameters, model))
    return sum(t.numel() for t in whole if t.requires_grad or not trainable_only)


def _counted(method: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What ``method`` of the class counts in a stand-in for ``model`` that has the whole tensors, without values."""
    whole = object.__new__(type(model))
    whole.__dict__.update(model.__dict__)
    for name in ("named_parameters", "named_buffers"):
        whole.__dict__[name] = partial(_named, getattr(nn.Module, name), model)
    whole.__dict__["named_modules"] = lambda *_, **__: (
        (name, nn.Embedding(1, 1, device="meta") if isinstance(module, ParallelEmbedding) else module)
        for name, module in model.named_modules()
    )
    return method(whole, *args, **kwargs)


def _named(walk: Callable[..., Any], model: nn.Module, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``model`` as they are without ranks. Layers on other stages are like those on this one."""
    stages = {f"{name}.": m for name, m in model.named_modules() if isinstance(m, PipelinedLayers)}
    for name, t in walk(model):
        mark = sharding(t)
        shape = t.shape if mark is None else mark.layout.shape
        whole: Tensor = torch.empty(shape, dtype=t.dtype, device="meta")
        whole = nn.Parameter(whole, t.requires_grad) if isinstance(t, nn.Parameter) else whole
        names = [name]
        for prefix, layers in stages.items():
            if name.startswith(prefix) and not layers.elsewhere:
                number, _, rest = name.removeprefix(prefix).partition(".")
                here = len(list(layers.children()))
                names = [f"{prefix}{i}.{rest}" for i in range(int(number) % here, layers.num_layers, here)]
        yield from ((each, whole) for each in names)
    for prefix, layers in stages.items():
        for number, tensors in layers.elsewhere.items():
            of_kind = [name for name, t in tensors.items() if isinstance(t, nn.Parameter) == (walk is _PARAMETERS)]
            yield from ((f"{prefix}{number}.{name}", tensors[name]) for name in of_kind)


def summary_of(model: nn.Module, capacity_factor: float | None) -> str:
    """How much of a model is sharded, and which modules of a hundredth of it or more stay whole, in one line."""
    split = sum(map(_sharded, model.parameters()))
    sizes = {id(p): p.numel() for p in model.parameters() if not _sharded(p)}
    total = max(split + sum(sizes.values()), 1)
    names: Counter[str] = Counter()
    for name, module in _whole(model, ""):
        names[name] += sum(sizes.pop(id(p), 0) for p in module.parameters())
    large = [f"{name}.*" for name, size in names.most_common() if size >= total / 100]
    named = f"; whole: {', '.join(large)}" if large else ""
    if isinstance(model.get_output_embeddings(), ColumnParallelLinear) and not is_own(model):  # type: ignore[operator]
        named += "; logits are gathered in every step, for its forward is not transformers' own"
    if capacity_factor is not None:
        named += f"; capacity_factor={capacity_factor} drops choices: tpcore_hf.ExpertLoad says how many"
    return f"{type(model).__name__}: sharded {split / total:.0%} of the parameters{named}"


def _sharded(p: Tensor) -> int:
    """The number of entries of a whole parameter that is sharded; 0 for any other."""
    mark = sharding(p)
    return 0 if mark is None or not mark.layout.cuts else math.prod(mark.layout.shape)


def _whole(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules without a sharded parameter."""
    if not any(map(_sharded, module.parameters())):
        yield wildcard(name), module
        return
    for child, inner in module.named_children():
        yield from _whole(inner, f"{name}.{child}".lstrip("."))
