"""Converts the state of ``Zero1`` to the plain optimizer's state and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layers.sharding import sharding, stamp
from .chunk import ParameterChunk, ReadRun

MASTER = "master"
GRADIENT = "gradient"
"""Key of the mean over dp of the gradients that no step has used yet: of a save between the backwards of one
step."""


class Mean(NamedTuple):
    """A mean over dp that is not taken yet. ``take`` is collective over dp."""

    dtype: torch.dtype
    take: Callable[[], Tensor]


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
    packed: dict[str, Any],
    parameters: Sequence[Tensor],
    chunks: Mapping[Tensor, ParameterChunk],
    means: Mapping[int, Mean],
) -> Outline:
    """The outline of ``packed``, an optimizer's ``state_dict()`` that has this rank's chunks. ``means``: of
    gradients, by number of the parameter."""
    gather: dict[int, Callable[[], Tensor]] = {}
    states: dict[Any, Any] = {}

    def later(p: Tensor, dtype: torch.dtype, how: Callable[[], Tensor]) -> Tensor:
        leaf = torch.empty(p.shape, dtype=dtype, device="meta")
        if (found := sharding(p)) is not None:
            stamp(leaf, found)
        gather[id(leaf)] = how
        return leaf

    for index in sorted({*packed["state"], *means}):
        p, states[index] = parameters[index], {}
        for key, value in packed["state"].get(index, {}).items():
            cut = isinstance(value, Tensor) and value.shape == (chunks[p].length,)
            states[index][key] = later(p, value.dtype, partial(chunks[p].whole, value)) if cut else value
        if index in means:
            states[index][GRADIENT] = later(p, *means[index])
    return Outline({**packed, "state": states}, gather)


class Entries(NamedTuple):
    """What one rank takes of a saved state: the base optimizer's state over its chunks, and by parameter its
    chunks of master values and the means of gradients that no step has used."""

    state: dict[str, Any]
    masters: dict[Tensor, Tensor]
    gradients: dict[Tensor, Tensor]


def entries_of(
    saved: Mapping[str, Any],
    parameters: Sequence[Tensor],
    chunks: Mapping[Tensor, ParameterChunk],
    keys: Collection[str],
    index: int,
    runs: Mapping[int, ReadRun],
) -> Entries:
    """The entries of dp rank ``index`` of a plain optimizer's state.

    ``keys``: state keys with a value for each entry. ``runs``: readers by the ``id`` of the tensors on meta
    that stand for values that are still to be read. Parameters are numbered in the order of the groups.
    """
    states: dict[Any, Any] = {}
    masters: dict[Tensor, Tensor] = {}
    gradients: dict[Tensor, Tensor] = {}
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
            run, where = runs.get(id(value)), f"state[{number}].{key}"
            if key == GRADIENT:
                _check_shape(value, p, where)
                gradients[p] = _read(value, run)
            elif isinstance(value, Tensor) and (key in keys or key == MASTER or _like(value, p)):
                part = _part(value, p, chunks[p], index, run, where)
                if key == MASTER:
                    masters[p] = part
                else:
                    states[number][key] = part
            else:
                states[number][key] = _read(value, run)
    return Entries({**saved, "state": states}, masters, gradients)


def _read(value: Any, run: ReadRun | None) -> Any:
    """All of ``value``, which stands for a tensor in a file if there is a ``run``."""
    if run is None:
        return value
    out = torch.empty(value.numel(), dtype=value.dtype)
    run(0, out)
    return out.view(value.shape)


def _like(value: Tensor, p: Tensor) -> bool:
    return value.ndim > 0 and value.shape == p.shape


def _part(
    value: Tensor, p: Tensor, chunk: ParameterChunk, index: int, run: ReadRun | None, where: str
) -> Tensor:
    _check_shape(value, p, where)
    if run is not None:
        return chunk.read_on_host(run, value.dtype, index)
    return chunk.cut_on_host(value, index) if value.device.type == "cpu" else chunk.cut(value)


def _check_shape(value: Tensor, p: Tensor, where: str) -> None:
    if value.shape != p.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)} and its parameter {tuple(p.shape)} on this rank: "
            "load the checkpoint by tpcore.checkpoint.load, which cuts for this job's tp"
        )
