"""What is asked where an optimizer steps: that it treats each entry of a parameter by itself, as parts require."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..layout.shard import mark_of
from .context import current, is_initialized

_NORMS = "it scales a parameter's update by norms of all of it"
_FACTORS = "it keeps statistics of whole rows and columns"
MIXING = {
    "Adafactor": _FACTORS,
    "CAME": _FACTORS,
    "LAMB": _NORMS,
    "LARS": _NORMS,
    "LBFGS": "its direction comes from all parameters together",
    "Muon": "it orthogonalizes whole matrices, which tpcore.Muon puts together",
    "NovoGrad": _NORMS,
    "SM3": _FACTORS,
    "SOAP": _FACTORS,
    "Shampoo": _FACTORS,
}
"""Optimizers that mix entries, with the reason. The case of names does not count."""

_STEPS_PARTS = "tpcore_steps_parts"
"""Attribute of an optimizer that may step parts of parameters; of a class that knows parts, the keys of its state
with a value for each entry."""
TRIAL = "tpcore_trial"
"""Attribute of an optimizer that is tried on tensors of no model."""
# options of the implementation that do not change the result; some of them need a device
_WAYS = ("capturable", "differentiable", "foreach", "fused")


class Trial(NamedTuple):
    """``mixes``: why an optimizer is taken to mix entries. ``keys``: those of its state that have a value for
    each entry."""

    mixes: str | None
    keys: frozenset[str]


def tried(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Trial | None:
    """What two small steps of an optimizer show. None for one that cannot be made on the CPU from those of
    ``options`` that its constructor takes, or that takes no step without a closure."""
    if own_parts(cls):
        return None
    takes = inspect.signature(cls).parameters
    try:
        return _trial(cls, {key: value for key, value in options.items() if key in takes and key != "params"})
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError, ImportError):
        why = _known(cls)
        return None if why is None else Trial(why, frozenset())


def own_parts(cls: type[torch.optim.Optimizer]) -> frozenset[str]:
    """The keys of the state of a class that itself knows whose parts it steps; none for other optimizers."""
    keys: frozenset[str] = getattr(cls, _STEPS_PARTS, frozenset())
    return keys


def check_elementwise(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> frozenset[str]:
    """The keys of its state that have a value for each entry. ValueError for an optimizer that mixes entries: known by
    name, or found by two small steps. TypeError for what is no class."""
    if not isinstance(cls, type):
        first = f"not a {type(cls).__name__} first"
        raise TypeError(f"Zero1 takes an optimizer's class, the parameters and then its options, {first}")
    if keys := own_parts(cls):
        return keys
    why = _known(cls)
    trial = Trial(why, frozenset()) if why is not None else _trial(cls, options)
    if trial.mixes is not None:
        raise ValueError(
            f"Zero1 gives an optimizer a part of each parameter, and {cls.__name__} mixes its entries: "
            f"{trial.mixes}. Use it without Zero1, or one that treats each entry by itself, as AdamW does"
        )
    return trial.keys


def check_steps_parts(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for an optimizer that mixes entries of a parameter of which this rank has a part, and warn of
    one that cannot be tried; once for an optimizer."""
    if getattr(optimizer, _STEPS_PARTS, None) is not None:
        return
    mark = next((mark for p in parameters if (mark := mark_of(p)) is not None), None)
    if mark is None:
        return
    cls, trial = type(optimizer), tried(type(optimizer), optimizer.defaults)
    if trial is not None and trial.mixes is not None:
        raise ValueError(
            f"this rank has a part of each parameter that is sharded over {' and '.join(mark.axes)}, and "
            f"{cls.__name__} mixes a parameter's entries: {trial.mixes}, so each rank would step by its part "
            "alone. Use an optimizer that treats each entry by itself, such as AdamW or SGD"
        )
    if trial is None:
        warnings.warn(
            f"{cls.__name__} cannot be tried on a small tensor: whether it treats each entry by itself, as "
            "sharded parameters require, is not known",
            stacklevel=2,
        )
    vars(optimizer)[_STEPS_PARTS] = True


@contextmanager
def steps_asked() -> Iterator[None]:
    """In the block, ``check_steps_parts`` for every optimizer of torch before it steps, and what waits for steps in the
    rank's context."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            check_steps_parts(optimizer, (p for group in optimizer.param_groups for p in group["params"]))
            for told in [*current().before_steps] if is_initialized() else ():
                told(optimizer)

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()


def _known(cls: type) -> str | None:
    reasons = {name.lower(): why for name, why in MIXING.items()}
    return next((reasons[c.__name__.lower()] for c in cls.__mro__ if c.__name__.lower() in reasons), None)


def _trial(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Trial:
    trial_options = {key: value for key, value in options.items() if key not in _WAYS}
    if trial_options.get("lr") is not None:
        trial_options["lr"] = 0.1  # a schedule may begin with 0, and a tensor may be on a device
    values = torch.linspace(-1, 2, 12, dtype=torch.float64, device="cpu").view(3, 4)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        whole, states = _stepped(cls, trial_options, [values])
        single, _ = _stepped(cls, trial_options, [*values.view(12, 1)])
    why = _known(cls)
    # 1e-9 in float64: kernels may round the last bits of a short tensor differently
    if why is None and not torch.allclose(whole[0].view(12, 1), torch.stack(single), rtol=1e-9, atol=1e-9):
        why = "a step of a whole tensor is not that of its entries, each by itself"
    return Trial(why, frozenset(k for k, v in states[0].items() if isinstance(v, Tensor) and v.shape == (3, 4)))


def _stepped(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], values: list[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The parameters and their states after two steps."""
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = cls(params, **options)
    vars(optimizer)[TRIAL] = True
    for _ in range(2):
        for p in params:
            p.grad = p.detach() ** 3 + 0.5
        optimizer.step()
    return [p.detach() for p in params], [dict(optimizer.state[p]) for p in params]
