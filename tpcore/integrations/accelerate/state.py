"""The state of a loop in one checkpoint, which any mesh opens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ... import checkpoint
from ...train.zero import Zero1, fitted


def name_parameters(optimizer: Any, model: nn.Module) -> None:
    """Let an optimizer know the names of its parameters, by which another mesh finds their state."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group.setdefault("param_names", [names[id(p)] for p in group["params"]])


def over_dp(optimizer: Any, **options: Any) -> Zero1:
    """A ``Zero1`` that steps as ``optimizer`` would, which has no state yet; ``options``: its own."""
    kind = type(optimizer)
    if optimizer.state:
        raise ValueError(f"this {kind.__name__} has stepped already: ZeRO-1 begins before the first step")
    known = inspect.signature(kind).parameters

    def own(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key in known and key != "params"}

    groups = []
    for group in optimizer.param_groups:
        names = group.get("param_names")
        params = group["params"] if names is None else list(zip(names, group["params"], strict=True))
        # torch takes a group without parameters for one without names
        named: dict[str, Any] = {} if names is None or params else {"param_names": []}
        groups.append({**own(group), "params": params, **named})
    made = Zero1(kind, groups, **options, **own(optimizer.defaults))
    for mine, group in zip(made.param_groups, optimizer.param_groups, strict=True):
        mine.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
    # a scheduler that was made for `optimizer` goes on by these groups, and asks whether that has stepped
    optimizer.param_groups = made.param_groups
    optimizer._opt_called = True
    return made


def _one(models: Sequence[nn.Module]) -> nn.Module:
    if len(models) != 1:
        raise ValueError(
            f"save_state and load_state are for one prepared model, not {len(models)}: call "
            "tpcore.checkpoint.save for each"
        )
    return models[0]


def save_loop(where: str, accelerator: Any, others: Sequence[Any]) -> None:
    """Save model, optimizers, schedulers, and the ``state_dict`` of each of ``others``. Collective."""
    model = _one(accelerator._models)
    state: dict[str, Any] = {"model": model.state_dict(), "step": accelerator.step}
    for i, optimizer in enumerate(accelerator._optimizers):
        name_parameters(optimizer.optimizer, model)
        state[f"optimizer_{i}"] = optimizer.optimizer
    state |= {f"scheduler_{i}": s.state_dict() for i, s in enumerate(accelerator._schedulers)}
    state |= {f"other_{i}": o.state_dict() for i, o in enumerate(others)}
    checkpoint.save(state, where)


def load_loop(where: str, accelerator: Any, others: Sequence[Any]) -> None:
    """Load the checkpoint of ``save_loop``, on any mesh. Collective."""
    model = _one(accelerator._models)
    for optimizer in accelerator._optimizers:
        name_parameters(optimizer.optimizer, model)
    rest = checkpoint.load(where, model)
    accelerator.step = rest["step"]
    for i, optimizer in enumerate(accelerator._optimizers):
        optimizer.optimizer.load_state_dict(fitted(optimizer.optimizer, rest[f"optimizer_{i}"]))
    for i, scheduler in enumerate(accelerator._schedulers):
        scheduler.load_state_dict(rest[f"scheduler_{i}"])
    for i, other in enumerate(others):
        other.load_state_dict(rest[f"other_{i}"])
