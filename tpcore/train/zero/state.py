"""The state of Zero1 as the plain optimizer's state and back: whose it is, of what kind, and each rank's entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...layers.sharding import sharding, stamp
from ...runtime.elementwise import tried
from .chunk import ParameterChunk, ReadRun

MASTER = "master"
IN_STEP = (
    "gradients of this step are summed and no step has used them: save after optimizer.step(), or drop them "
    "by optimizer.zero_grad()"
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
                    if (mark := sharding(value)) is not None:
                        stamp(values[key], mark)
        return self.state


def outline_of(
    packed: dict[str, Any], parameters: Sequence[Tensor], chunks: Mapping[Tensor, ParameterChunk]
) -> Outline:
    """The outline of ``packed``, an optimizer's ``state_dict()`` that has this rank's chunks."""
    gather: dict[int, Callable[[], Tensor]] = {}
    states: dict[Any, Any] = {}

    def later(p: Tensor, dtype: torch.dtype, gather_values: Callable[[], Tensor]) -> Tensor:
        leaf = torch.empty(p.shape, dtype=dtype, device="meta")
        if (mark := sharding(p)) is not None:
            stamp(leaf, mark)
        gather[id(leaf)] = gather_values
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
            entrywise = isinstance(value, Tensor) and value.ndim > 0 and value.shape == p.shape
            if isinstance(value, Tensor) and (key in keys or key == MASTER or entrywise):
                check_shape(value, p, f"state[{number}].{key}")
                part = chunks[p].cut(value) if run is None else chunks[p].read(run, value.dtype)
                if key == MASTER:
                    masters[p] = part
                else:
                    states[number][key] = part
            else:
                states[number][key] = _read(value, run)
    return {**saved, "state": states}, masters


def _read(value: Any, run: ReadRun | None) -> Any:
    """All of ``value``, which stands for a tensor in a file if there is a ``run``."""
    if run is None:
        return value
    out = torch.empty(value.numel(), dtype=value.dtype)
    run(0, out)
    return out.view(value.shape)


def check_shape(value: Tensor, p: Tensor, where: str) -> None:
    if value.shape != p.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)} and its parameter {tuple(p.shape)} on this rank: "
            "the parameters were in another order or cut for another tp: tpcore.checkpoint.load cuts for this"
        )


Saved = Mapping[str, Any]
"""An optimizer's ``state_dict()``."""


def renumbered(saved: Saved, groups: Sequence[dict[str, Any]], known: Mapping[str, Tensor]) -> Saved:
    """``saved`` with its parameters in the order of ``groups``, by name; unchanged if one side has no names.

    ``known``: further names of parameters, those of their model. ValueError if the names are others. Names
    may have one prefix more or less, as those of a wrapped model have.
    """
    saved_groups = saved["param_groups"]
    if not all(len(g.get("param_names") or ()) == len(g["params"]) for g in saved_groups):
        return saved
    place = {id(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
    named_places = {name: place[id(p)] for name, p in known.items() if id(p) in place}
    for i, group in enumerate(groups):
        named_places |= {name: (i, j) for j, name in enumerate(group.get("param_names") or ())}
    if {*named_places.values()} != {*place.values()}:  # some have no name
        return saved
    prefix, more = _prefix([n for g in saved_groups for n in g["param_names"]], named_places)
    ordered = []
    for i, group in enumerate(saved_groups):
        places = [named_places.get(more + name.removeprefix(prefix)) for name in group["param_names"]]
        expected = [(i, j) for j in range(len(groups[i]["params"]))] if i < len(groups) else []
        if sorted(places, key=repr) != sorted(expected, key=repr):
            names = [name for name, there in zip(group["param_names"], places, strict=True) if there not in expected]
            unmatched = [name for name, there in named_places.items() if there in expected and there not in places]
            raise ValueError(
                f"the saved optimizer has, in group {i}, parameters {names[:5]} that this optimizer's group "
                f"lacks, which has {unmatched[:5]} instead: make it from the same named_parameters() in the same "
                "groups as the one that was saved"
            )
        order = sorted(range(len(places)), key=lambda k: places[k] or ())
        ordered.append({**group, **{key: [group[key][k] for k in order] for key in ("params", "param_names")}})
    return {**saved, "param_groups": ordered}


def _prefix(saved: Sequence[str], names: Mapping[str, Any]) -> tuple[str, str]:
    """The prefix to take from ``saved`` names, and the one to put before them, to get those of ``names``."""
    for name in names if saved and saved[0] not in names else ():
        if saved[0].endswith(f".{name}"):
            return saved[0][: -len(name)], ""
        if name.endswith(f".{saved[0]}"):
            return "", name[: -len(saved[0])]
    return "", ""


def check_kind(
    cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any], saved: Saved, parameters: Sequence[Tensor]
) -> None:
    """Raise ValueError for the state of another kind of optimizer, and for values of other shapes."""
    first: Mapping[str, Any] = next(iter(saved["param_groups"]), {})
    trial = tried(cls, {**defaults, **first})
    if trial is None:
        return
    numbers = [*chain.from_iterable(group["params"] for group in saved["param_groups"])]
    if len(numbers) != len(parameters):
        return  # load_state_dict says it
    keys: set[str] = set()
    for number, p in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or not value.ndim or key == MASTER:
                continue
            if value.shape == p.shape:
                keys.add(key)
            elif key in trial.keys:
                check_shape(value, p, f"state[{number}].{key}")
    if keys and not trial.mixes and (trial.keys - keys or not trial.keys):
        raise ValueError(
            f"the saved optimizer has {sorted(keys)} for each entry of a parameter, and {cls.__name__} needs "
            f"{sorted(trial.keys) or 'nothing'}: it was saved by another kind of optimizer"
        )


def fitted(optimizer: torch.optim.Optimizer, saved: Saved, known: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """What the ``load_state_dict`` of ``optimizer`` takes: ``saved`` in its order, and of its kind."""
    ordered = renumbered(saved, optimizer.param_groups, known or {})
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    check_kind(type(optimizer), optimizer.defaults, ordered, parameters)
    return dict(ordered)
