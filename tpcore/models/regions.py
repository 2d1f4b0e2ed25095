"""From column to row layers: an input copied once for all that read it, and dropout that differs between tp ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers import ColumnParallelLinear, RowParallelLinear, share_input
from ..runtime.random import sharded
from . import plan
from .cuts import Cut
from .plan import REPLICATE, Rule, rule_of
from .source import argument_of_calls
from .summed import Switch, with_forward

_REGION = "_tpcore_region"
_DROPOUTS = frozenset(
    f"{kind}{suffix}"
    for kind in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_", "1d", "2d", "3d")
)
_COLUMNS = (plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN)


class Draws(TorchFunctionMode):
    """Functions that drop elements draw from the sharded stream while the data differ between the tp ranks. A mode sees
    functions inside attention like modules, and torch.compile traces it. It is entered in the forward itself, so that a
    recomputation passes through it too."""

    sharded = False
    """Whether the data are this rank's part: from a column layer to the next row layer."""

    def __init__(self, compiled: bool) -> None:
        """``compiled``: whether compiled forwards drop; dynamo cannot trace a sharded Parameter in a mode."""
        super().__init__()
        self.compiled = compiled

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = self.sharded and _draws(getattr(func, "__name__", ""), args, kwargs)
        with sharded() if draws else nullcontext():
            return func(*args, **kwargs)


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of the function ``name`` draws random numbers: another leaves the stream where it is."""
    if name in _DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        train = args[2] if len(args) > 2 else True
        return bool(p) and bool(kwargs.get("training", kwargs.get("train", train)))
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return name in ("bernoulli", "bernoulli_")


def _note(draws: Draws, layer: Any, args: Any, output: Any) -> None:
    """A hook of a parallel layer: whether its output is this rank's part."""
    row = isinstance(layer, RowParallelLinear)
    draws.sharded = layer.sequence_dim is not None if row else not layer.gather_output


def drop_by_rank(model: nn.Module, cuts: list[Cut], rules: Mapping[str, Rule]) -> Draws:
    """Let dropout between column and row layers differ between the tp ranks, in each module that calls column
    layers; in modules inside it that ``rules`` leave whole, it is replicated."""
    draws = Draws(_drops(model))
    for cut in cuts:
        layer = model.get_submodule(cut.name)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.register_forward_hook(partial(_note, draws))
    owners = columns_by_owner(model, cuts).keys()
    for name, module in list(model.named_modules()):
        inside = any(name.startswith(f"{owner}.") for owner in owners)
        if name in owners or (inside and rule_of(name, rules) == REPLICATE):
            draw_inside(module, draws)
    return draws


def _drops(model: nn.Module) -> bool:
    """Whether a dropout is on, by the names of options: a compiled forward cannot ask each call."""
    options = [vars(module) for module in model.modules()]
    options += [vars(module.config) for module in model.modules() if hasattr(module, "config")]
    numbers = (v for o in options for k, v in o.items() if "drop" in k and isinstance(v, int | float))
    return any(numbers) or any(getattr(m, "p", 0) for m in model.modules() if "Drop" in type(m).__name__)


def draw_inside(module: nn.Module, draws: Draws, spread: Switch | None = None) -> None:
    """Enter ``draws`` in each forward of ``module``. ``spread``: whether its input is this rank's part."""
    original = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # children too, as people turn on dropout alone
        if not (self.training or any(child.training for child in self.children())):
            return original.forward(self, *args, **kwargs)
        draws, spread = self.__dict__[_REGION]
        if torch.compiler.is_compiling() and not draws.compiled:
            return original.forward(self, *args, **kwargs)
        before = draws.sharded
        draws.sharded = spread is not None and spread()
        try:
            with draws:
                return original.forward(self, *args, **kwargs)
        finally:
            draws.sharded = before

    module.__dict__[_REGION] = draws, spread
    module.__class__ = with_forward(original, forward)


def columns_by_owner(model: nn.Module, cuts: list[Cut]) -> dict[str, dict[str, ColumnParallelLinear]]:
    """The column layers whose outputs stay parts: by the name of their owner, then by their name in it."""
    found: dict[str, dict[str, ColumnParallelLinear]] = defaultdict(dict)
    for cut in cuts:
        layer = model.get_submodule(cut.name)
        if cut.style in _COLUMNS and isinstance(layer, ColumnParallelLinear):
            found[cut.owner][cut.name.rpartition(".")[2]] = layer
    return found


def share_inputs(model: nn.Module, cuts: list[Cut], copy: Callable[[Tensor], Tensor] | None = None) -> set[str]:
    """Copy inputs once in the modules of which only the column layers read them; return these modules' names."""
    done = set()
    for name, columns in columns_by_owner(model, cuts).items():
        owner = model.get_submodule(name)
        argument = argument_of_calls(type(owner).forward, set(columns))
        if argument is not None and (copy is not None or len(columns) > 1):
            share_input(owner, *columns.values(), argument=argument, copy=copy)
            done.add(name)
    return done
