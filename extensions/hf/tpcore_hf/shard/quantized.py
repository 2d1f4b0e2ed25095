"""Quantization of a model's linear layers, after they are sharded and, from files, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from tpcore.layers.linear import ParallelLinear
from tpcore.layers.quantized import QuantizedLinear, check_dtype, freeze, hold


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The linear layers inside of numbered layers, which does not include heads. ValueError if there are none."""
    every = model.named_modules()
    linear = [(n, m) for n, m in every if type(m) is nn.Linear or (isinstance(m, ParallelLinear) and not m.transposed)]
    layers = [(name, m) for name, m in linear if any(map(str.isdigit, name.split(".")))]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no nn.Linear in its layers, so there is nothing to quantize")
    return layers


def check(model: nn.Module, dtype: torch.dtype | None, *, staged: bool) -> None:
    """Before any change: ValueError for what ``parallelize`` cannot quantize."""
    method = getattr(model, "quantization_method", None)  # transformers sets it
    method = getattr(method, "value", method)
    if method not in (None, "torchao"):  # of torchao's, modules that stay whole are right
        raise ValueError(
            f"weights quantized by {method} cannot be sharded: load the model without quantization_config, from "
            "files that are not quantized, and pass quantize=torch.int8 to parallelize"
        )
    if dtype is None:
        return
    check_dtype(dtype)
    if staged:
        raise ValueError(f"quantize={dtype} with num_microbatches=: quantized layers are not spread over stages")
    for name, layer in layers_of(model):
        if "forward" in vars(layer) or layer._parameters.get("weight") is None:
            raise ValueError(
                f"quantize={dtype}: {name} has a forward set on it, or a weight that is computed of others: delete it, "
                "or make it one parameter (prune.remove)"
            )


def quantize(model: nn.Module, layer: Any, dtype: torch.dtype) -> None:
    """Quantize one ``layer`` of the model in place. Collective over the layer's group."""
    if isinstance(layer, ParallelLinear):
        layer.quantize(dtype)
    else:
        layer.__class__ = QuantizedLinear
        freeze(layer, dtype)
    model.__dict__["save_pretrained"] = _refuse_to_save


@contextmanager
def torchao_aside(model: nn.Module, quantize: torch.dtype | None, *, staged: bool) -> Iterator[None]:
    """Inside, linear layers that torchao has quantized to int8 have a weight without values, to be sharded; then they
    have their entries and scales, this rank's part where they are sharded. If it fails, they are as they were.
    ValueError for other kinds of torchao's weights, and with ``quantize`` or stages."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and hasattr(m.weight, "qdata")}
    if layers and (quantize is not None or staged):
        raise ValueError(
            f"{next(iter(layers))} is quantized by torchao: leave out quantize=, which would do it again, and "
            "num_microbatches=, for quantized layers are not spread over stages"
        )
    before: dict[str, Any] = {name: layer.weight for name, layer in layers.items()}
    for name, w in before.items():
        zero, inputs = getattr(w, "zero_point", None), getattr(w, "act_quant_kwargs", None)
        plain = (zero is None or not zero.any()) and inputs is None  # symmetric, of weights alone
        if w.qdata.dtype is not torch.int8 or w.scale.shape != (len(w.qdata), 1) or not plain:
            raise ValueError(
                f"{name}: a weight of torchao's {type(w).__name__}, {w.qdata.dtype} with scales of "
                f"{tuple(w.scale.shape)}, is not sharded; Int8WeightOnlyConfig's, with a scale for each channel, is"
            )
    try:
        for name, layer in layers.items():
            w = before[name]
            layer.weight = nn.Parameter(torch.empty(w.shape, dtype=w.dtype, device="meta"), requires_grad=False)
        yield
    except BaseException:
        for name, layer in layers.items():
            layer.weight = before[name]
        raise
    for name, w in before.items():
        sharded: Any = model.get_submodule(name)
        values = w.qdata, w.scale.flatten().float()
        if isinstance(sharded, ParallelLinear):
            sharded.take(*values)
        else:
            sharded.__class__ = QuantizedLinear
            hold(sharded, *values)
        model.__dict__["save_pretrained"] = _refuse_to_save


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "a quantized model is not written as transformers' files, which have no scales: save it with "
        "tpcore.checkpoint.save, or its adapters with save_pretrained of the PeftModel"
    )


def apart(model: nn.Module, layers: list[tuple[str, Any]]) -> Iterator[tuple[nn.Module, Any]]:
    """First the model without ``layers``, then one layer at a time: with a module that has it alone, by its name."""
    for name, _ in layers:
        model.set_submodule(name, nn.Identity())
    try:
        yield model, None
        for name, layer in layers:
            alone = node = nn.Module()
            *owners, leaf = name.split(".")
            for owner in owners:
                node.add_module(owner, inner := nn.Module())
                node = inner
            node.add_module(leaf, layer)
            yield alone, layer
    finally:
        for name, layer in layers:
            model.set_submodule(name, layer)
