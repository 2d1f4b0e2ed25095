"""Converts the state of ``Zero1`` to the plain optimizer's state and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...layers.sharding import sharding, stamp
from .chunk import ParameterChunk, ReadRun

MASTER = "master"
IN_STEP = (
    "gradients of this step are summed and no step has used them: save after optimizer.step(), or drop them "
    "by optimizer.zero_grad()"
)
SUMS = "gradient"
"""Key of sums of gradients that no step had used, in states of earlier versions."""
OF_SUMS = (
    "the optimizer's state was saved between the backwards of one step, with the gradients summed so far, "
    "which is not supported any more: load a checkpoint that was saved after optimizer.step()"
)


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

    def later(p: Tensor, dtype: torch.dtype, how: Callable[[], Tensor]) -> Tensor:
        leaf = torch.empty(p.shape, dtype=dtype, device="meta")
        if (found := sharding(p)) is not None:
            stamp(leaf, found)
        gather[id(leaf)] = how
        return leaf

    for index in sorted(packed["state"]):
        p, states[index] = parameters[index], {}
        for key, value in packed["state"][index].items():
            cut = isinstance(value, Tensor) and value.shape == (chunks[p].length,)
            states[index][key] = later(p, value.dtype, partial(chunks[p].whole, value)) if cut else value
    return Outline({**packed, "state": states}, gather)


def entries_of(
    saved: Mapping[str, Any],
    parameters: Sequence[Tensor],
    chunks: Mapping[Tensor, ParameterChunk],
    keys: Collection[str],
    runs: Mapping[int, ReadRun],
) -> tuple[dict[str, Any], dict[Tensor, Tensor]]:
    """This rank's entries of a plain optimizer's state: the base optimizer's state over its chunks, and by parameter
    its chunks of master values.

    ``keys``: state keys with a value for each entry. ``runs``: readers by the ``id`` of the tensors on meta
    that stand for values that are still to be read. Parameters are numbered in the order of the groups.
    """
    states: dict[Any, Any] = {}
    masters: dict[Tensor, Tensor] = {}
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(
            f"the state that is loaded is of {len(numbers)} parameters, and this optimizer has {len(parameters)}"
        )
    by_number = dict(zip(numbers, parameters, strict=True))
    for number, values in saved["state"].items():
        p, states[number] = by_number[number], {}
        for key, value in values.items():
            run = runs.get(id(value))
            like = isinstance(value, Tensor) and value.ndim > 0 and value.shape == p.shape
            if isinstance(value, Tensor) and (key in keys or key == MASTER or like):
                check_shape(value, p, f"state[{number}].{key}")
                part = _part(value, chunks[p], run)
                if key == MASTER:
                    masters[p] = part
                else:
                    states[number][key] = part
            else:
                states[number][key] = _read(value, run)
    return {**saved, "state": states}, masters


def refuse_sums(saved: Mapping[str, Any]) -> None:
    """Raise ValueError for a state that an earlier version saved between the backwards of one step."""
    if any(isinstance(values, Mapping) and SUMS in values for values in saved["state"].values()):
        raise ValueError(OF_SUMS)


def _read(value: Any, run: ReadRun | None) -> Any:
    """All of ``value``, which stands for a tensor in a file if there is a ``run``."""
    if run is None:
        return value
    out = torch.empty(value.numel(), dtype=value.dtype)
    run(0, out)
    return out.view(value.shape)


def _part(value: Tensor, chunk: ParameterChunk, run: ReadRun | None) -> Tensor:
    if run is not None:
        return chunk.read_on_host(run, value.dtype)
    return chunk.cut_on_host(value) if value.device.type == "cpu" else chunk.cut(value)


def check_shape(value: Tensor, p: Tensor, where: str) -> None:
    if value.shape != p.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)} and its parameter {tuple(p.shape)} on this rank: "
            "the parameters were in another order or cut for another tp: tpcore.checkpoint.load cuts for this"
        )
