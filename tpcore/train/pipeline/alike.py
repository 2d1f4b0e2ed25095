"""Finds the layers of a pipeline in a model, and checks that the stages can run one program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from torch import nn

Signature = dict[str, Any]
BALANCED = "balanced"


def check_layers(layers: Sequence[nn.Module], stages: int) -> None:
    """Raise ValueError if ``layers`` do not divide into ``stages`` stages that run one program."""
    count = len(layers)
    if not count:
        raise ValueError("a pipeline of no layers: give the layers that the model loops over")
    if count % stages:
        fit = [n for n in range(1, count + 1) if not count % n]
        near = sorted({count // stages * stages, -(-count // stages) * stages} - {0})
        raise ValueError(
            f"{count} layers do not divide into pp={stages} stages, which must run one program: pp of "
            f"{_any(fit)} would do, or a model of {_any(near)} layers, or on eager backends "
            f"layers_per_stage={BALANCED!r}"
        )
    check_own_parameters(layers)
    signatures = [_signature(layer) for layer in layers]
    for i, signature in enumerate(signatures):
        j = i % (count // stages)
        first = signatures[j]
        for differs in [name for name in {**first, **signature} if signature.get(name) != first.get(name)]:
            raise ValueError(
                f"layers {j} and {i} would do the same on two stages, and differ: {differs or 'the layer'} is "
                f"{first.get(differs, 'not there')} in the one and {signature.get(differs, 'not there')} in the other. "
                "Stages run one program: a pattern of layers must repeat on each of them, so pp has to "
                "divide the number of times that it occurs"
            )


def check_own_parameters(layers: Sequence[nn.Module]) -> None:
    """Raise ValueError for layers that share a parameter."""
    owners: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            if owners.setdefault(id(p), i) != i:
                raise ValueError(
                    f"layers {owners[id(p)]} and {i} share a parameter, {name}: they would be on two stages "
                    "that do not add its gradients up"
                )


def ends_of(layers: Sequence[nn.Module], per_stage: Sequence[int] | str, stages: int) -> tuple[int, ...]:
    """The number of the first layer behind each stage. ``per_stage``: numbers of layers, or BALANCED: those of which
    the largest stage has the fewest parameters. ValueError for numbers that are not those of the layers."""
    if per_stage == BALANCED and len(layers) >= stages:
        counts = _balanced([sum(p.numel() for p in layer.parameters()) for layer in layers], stages)
    else:
        counts = () if isinstance(per_stage, str) else tuple(per_stage)
    if len(counts) != stages or sum(counts) != len(layers) or not all(count > 0 for count in counts):
        raise ValueError(
            f"layers_per_stage={per_stage!r} does not divide {len(layers)} layers into pp={stages} stages of one layer "
            f"or more: give {stages} numbers whose sum is {len(layers)}, or {BALANCED!r}"
        )
    return tuple(accumulate(counts))


def _balanced(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Numbers of neighbours in each of ``stages`` runs, of which the largest sum is the smallest possible."""

    @cache
    def best(start: int, runs: int) -> tuple[int, tuple[int, ...]]:
        if runs == 1:
            return sum(sizes[start:]), (len(sizes) - start,)
        found = []
        for count in range(len(sizes) - start - runs + 1, 0, -1):
            largest, rest = best(start + count, runs - 1)
            found.append((max(largest, sum(sizes[start : start + count])), (count, *rest)))
        return min(found, key=lambda each: each[0])

    return best(0, stages)[1]


def _any(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if numbers[1:] else "") + str(numbers[-1])


def _signature(layer: nn.Module) -> Signature:
    """Two layers run one program if these are equal: classes, parameters, string attributes."""
    signature: Signature = {}
    for name, module in layer.named_modules():
        signature[name] = type(module).__name__
        dotted = name and f"{name}."
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                signature[dotted + key] = f"{t.dtype} {list(t.shape)}"
                if isinstance(t, nn.Parameter) and not t.requires_grad:
                    signature[dotted + key] += " without gradient"
        for key, value in vars(module).items():
            if isinstance(value, str):
                signature[dotted + key] = repr(value)
    return signature


def one_call_for_all(layers: Sequence[nn.Module]) -> None:
    """Raise ValueError if layers are of different kinds, because models pass those different arguments: a
    loop calls the pipeline only once, with the arguments of the first layer."""
    kinds = [{k: v for k, v in _signature(layer).items() if v[:1] in "'\""} for layer in layers]
    for i, other in enumerate(kinds):
        if other != kinds[0]:
            name = next(k for k in {**kinds[0], **other} if kinds[0].get(k) != other.get(k))
            raise ValueError(
                f"layers 0 and {i} are of two kinds: {name} is {kinds[0].get(name)} and {other.get(name)}. A "
                "model passes such layers different arguments, a mask each for one, and a pipeline is called "
                "once for all of them"
            )


def find_layers(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that owns the only list of layers of ``model``, and the list's name in it. ValueError if
    there is no list, or more than one."""
    lists: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            full_name = f"{path}.{name}" if path else name
            inside = any(full_name.startswith(f"{outer}.") for outer in lists)
            if isinstance(child, nn.ModuleList) and len(child) and not inside:
                lists[full_name] = module, name
    if len(lists) == 1:
        return next(iter(lists.values()))
    kind = type(model).__name__
    if not lists:
        raise ValueError(
            f"{kind} has no nn.ModuleList of layers to make a pipeline of: put its layers into one, over "
            "which forward loops"
        )
    first = next(iter(lists))
    raise ValueError(
        f"{kind} has several lists of layers, {', '.join(lists)}, and a pipeline is made of one: an "
        "encoder and its decoder would be two. Choose it yourself: "
        f"model.{first} = tpcore.PipelinedLayers(model.{first}, num_microbatches)"
    )
