"""Converts the state of ``Zero1`` to the plain optimizer's state and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...layers.sharding import sharding, stamp
from .chunk import ParameterChunk

MASTER = "master"


@dataclass(frozen=True)
class Outline:
    """An optimizer's ``state_dict()`` with meta tensors in place of tensors that are not gathered yet.

    ``gather``: for the ``id`` of each meta tensor, a function that returns its values, collective over dp.
    All dp ranks have the same tensors in the same order.
    """

    state: dict[str, Any]
    gather: Mapping[int, Callable[[], Tensor]]

    def gathered(self) -> dict[str, Any]:
        """The state with all tensors gathered. Collective over dp."""
        for values in self.state["state"].values():
            for key, value in values.items():
                if id(value) in self.gather:
                    values[key] = self.gather[id(value)]()
                    if (found := sharding(value)) is not None:
                        stamp(values[key], found)
        return self.state


def outline_of(
    packed: dict[str, Any], parameters: Sequence[Tensor], chunks: Mapping[Tensor, ParameterChunk]
) -> Outline:
    """The outline of ``packed``, an optimizer's ``state_dict()`` that has this rank's chunks."""
    gather: dict[int, Callable[[], Tensor]] = {}
    states: dict[Any, Any] = {}
    for index, values in packed["state"].items():
        p, states[index] = parameters[index], {}
        for key, value in values.items():
            if not isinstance(value, Tensor) or value.shape != (chunks[p].length,):
                states[index][key] = value
                continue
            leaf = torch.empty(p.shape, dtype=value.dtype, device="meta")
            if (found := sharding(p)) is not None:
                stamp(leaf, found)
            states[index][key] = leaf
            gather[id(leaf)] = partial(chunks[p].whole, value)
    return Outline({**packed, "state": states}, gather)


def entries_of(
    saved: Mapping[str, Any],
    parameters: Sequence[Tensor],
    chunks: Mapping[Tensor, ParameterChunk],
    keys: Collection[str],
    index: int,
) -> tuple[dict[str, Any], dict[Tensor, Tensor]]:
    """The chunks of dp rank ``index`` of a plain optimizer's state and of the master values in it.

    ``keys``: state keys with a value for each entry. Parameters are numbered in the order of the groups.
    """
    states: dict[Any, Any] = {}
    masters: dict[Tensor, Tensor] = {}
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(
            f"the state that is loaded is of {len(numbers)} parameters, and this optimizer has "
            f"{len(parameters)}"
        )
    by_number = dict(zip(numbers, parameters, strict=True))
    for number, values in saved["state"].items():
        p, states[number] = by_number[number], {}
        for key, value in values.items():
            part = value
            if isinstance(value, Tensor) and (key in keys or key == MASTER or _like(value, p)):
                part = _part(value, p, chunks[p], index, f"state[{number}].{key}")
            if key == MASTER:
                masters[p] = part
            else:
                states[number][key] = part
    return {**saved, "state": states}, masters


def _like(value: Tensor, p: Tensor) -> bool:
    return value.ndim > 0 and value.shape == p.shape


def _part(value: Tensor, p: Tensor, chunk: ParameterChunk, index: int, where: str) -> Tensor:
    if value.shape != p.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)} and its parameter {tuple(p.shape)} on this rank: "
            "load the checkpoint by tpcore.checkpoint.load, which cuts for this job's tp"
        )
    return chunk.cut_on_host(value, index) if value.device.type == "cpu" else chunk.cut(value)
