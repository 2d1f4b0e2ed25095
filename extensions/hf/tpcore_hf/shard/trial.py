"""A forward at the sizes of a rank, before any change: what fails or computes otherwise there than whole is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpcore import nested
from tpcore.backend.registry import observer_of
from tpcore.layers.module import ParallelModule
from tpcore.log import inform
from tpcore.private import BACKWARD_HOOKS, FORWARD_HOOKS
from tpcore.runtime.context import current

from ..plan import rules as plan
from ..plan.decisions import CLOSES, EMBEDDING, LINEAR, OPENS, Cut, features, is_linear
from ..plan.inputs import is_own, takes
from ..plan.rules import Rule, general, rule_of
from ..private import of_transformers
from .values import MORE, Alone, MadeUp, NotCompared, OtherValues, filled, inputs_of, is_large, mixed, needed, widened

Made = Mapping[nn.Module, tuple[Cut, ParallelModule]]
_OTHER = {plan.HEADS_ARGUMENT, plan.PARAMETER_HEADS}
"""Styles that change what a forward gets otherwise than by the sizes of a layer."""
_COUNTED = (
    " add radd iadd sub rsub isub mul rmul imul div rdiv divide true_divide truediv rtruediv itruediv floordiv "
    "rfloordiv floor_divide mod rmod remainder fmod pow rpow clamp clamp_min clamp_max lt le gt ge eq ne arange tensor "
    "full fill "
)
"""Functions of which a whole number is a value; of others it may be a size."""
_NEW = {Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros}


@dataclass
class _Calls:
    """Where a forward is. ``inside``: the modules that it has not left. ``open``: the layers whose features are a
    rank's, and that no row layer has read yet. ``parts``: by parameter the sharded layer that has it, ``read`` the one
    whose parameter the forward took past the layer's own."""

    made: Made
    sharded: Collection[nn.Module] = ()
    inside: list[nn.Module] = field(default_factory=list)
    open: list[Cut] = field(default_factory=list)
    parts: dict[Tensor, nn.Module] = field(default_factory=dict)
    read: nn.Module | None = None
    followed: dict[nn.Module, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """What layers' outputs, of which an observer sees the use, are in its eyes."""
    numbers: list[tuple[str, tuple[float, ...], nn.Module | None]] = field(default_factory=list)
    """Each function that was called with some, and where."""
    values: MadeUp | None = None
    """None: tensors have no values."""

    def enter(self, module: nn.Module, args: object) -> None:
        self.inside.append(module)

    def leave(self, module: nn.Module, args: object, output: Any) -> Any:
        self.inside.pop()
        cut, _ = self.made.get(module, (None, None))
        if cut is not None and cut.style in OPENS:
            self.open.append(cut)
        elif cut is not None:
            self.open.clear()
        return self.followed[module](output) if module in self.followed else output

    def computing(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``forward`` of a sharded ``module``, which may be called without the module's call."""
        self.inside.append(module)
        output = forward(*args, **kwargs)
        self.inside.pop()
        return output


class _Reads(TorchFunctionMode):
    """Raises where a forward takes the values of a sharded layer's parameter otherwise than by its call."""

    def __init__(self, calls: _Calls) -> None:
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kinds = getattr(func, "__name__", "").strip("_"), (float, int)
        values = (*args, *(kwargs or {}).values())
        if given := tuple(x for x in values if isinstance(x, kinds[: 1 + (f" {name} " in _COUNTED)])):
            self.calls.numbers.append((name, given, self.calls.inside[-1] if self.calls.inside else None))
        output = func(*args, **(kwargs or {}))
        # of the others these take a dtype and a device
        taken = args[:1] if func in (Tensor.to, Tensor.type_as) else args[1:] if func in _NEW else (args, kwargs)
        reads = any(True for _ in nested.tensors(output))
        for module in (self.calls.parts.get(t) for t in nested.tensors(taken)) if reads else ():
            if module is not None and module not in self.calls.inside[-1:]:
                self.calls.read = module
                raise ValueError("a parameter is read")
        return output


def check_forward(
    model: nn.Module, cuts: list[Cut], made: Made, user: Mapping[str, Rule], localize: Callable[[], None]
) -> None:
    """ValueError where the forward of a class that is not transformers' own, or by rules of a ``user``, does not take
    the parts of features that the layers ``made`` give: of tokens, and in training of labels too. ``localize``: sets
    how many heads a rank has. Of a forward that needs other inputs it is said that it was not tried. Hooks of modules
    are left out: they see nothing of it."""
    ends = [cut for cut in cuts if cut.style in OPENS | CLOSES]
    sharded = [cut for cut in cuts if cut.style in LINEAR | EMBEDDING]
    compared = is_own(model) and not any(rule_of(c.name, user) or _is_foreign(model, c.owner) for c in sharded)
    if compared or any(cut.style in _OTHER for cut in cuts):
        return
    observer, untried = observer_of(current(), certain=True), list[Exception]()
    for labels in (False, True):
        calls, whole = _Calls({c.module: made[c.module] for c in ends}, {c.module for c in sharded}), _Calls({})
        for cut in ends:
            if cut.style in OPENS and observer is not None and is_uncompared(model, cut, user):
                kind = "fused features" if is_fused(cut, cuts) else "features"
                calls.followed[cut.module] = partial(observer.part, comm=made[cut.module][1].tp, dim=-1, kind=kind)
        error = _error(model, calls, localize, labels)
        if calls.read is not None or (_error(model, whole, lambda: None, labels) is None and error is not None):
            raise ValueError(_refusal(model, calls, error)) from error
        if error is None:
            _check_numbers(model, calls, whole)
        else:
            untried.append(error)
    more = MORE if needed(model) else [None]
    valued = any(_compare(model, ends, made, localize, labels, given) for labels in (False, True) for given in more)
    if len(untried) == 2 and not valued and current().rank == 0:
        inform(
            f"{type(model).__name__}: whether its forward takes what a rank has was not tried, for it needs more than "
            f"tokens: {type(untried[0]).__name__}: {untried[0]}"
        )


def _compare(
    model: nn.Module, ends: list[Cut], made: Made, localize: Callable[[], None], labels: bool, given: str | None
) -> bool:
    """ValueError where a layer reads something else on a rank than in the whole model, with made-up values. Whether it
    was tried."""
    values, comm, alone = MadeUp(made), current().comm("tp"), cast(Any, Alone())
    with comm.traced(alone, alone):
        for rank in (None, None, 0, comm.size - 1):  # the whole model's twice: what it draws is other each time
            whole = rank is None
            calls = _Calls(
                {} if whole else {c.module: made[c.module] for c in ends}, made.keys(), values=values.on(rank)
            )
            error = _error(model, calls, (lambda: None) if whole else localize, labels, given)
            if calls.read is not None or not (whole or error is None or isinstance(error, NotCompared)):
                raise ValueError(_refusal(model, calls, error)) from error
            if error is not None:
                return False
    return True


def _check_numbers(model: nn.Module, calls: _Calls, whole: _Calls) -> None:
    """ValueError where a forward computes with a number that is another in the ``whole`` model."""
    for (name, here, inside), (other, there, _) in zip(calls.numbers, whole.numbers, strict=False):
        if name != other:
            return  # a loop over what a rank has
        if here != there:
            names = {module: general(model, at) for at, module in model.named_modules() if at}
            raise ValueError(
                f"{names.get(inside, 'its forward')} ({type(inside or model).__name__}) computes with a number of what "
                f"a rank has: {name} by {', '.join(map(str, here))}, and by {', '.join(map(str, there))} in the whole "
                "model: let it take in_features or out_features of a layer, or a size of the configuration, which are "
                "the whole's, and not one of a weight's or an output's shape"
            )


def is_uncompared(model: nn.Module, cut: Cut, user: Mapping[str, Rule]) -> bool:
    """Whether what follows a layer was compared with nothing: its rule is of a ``user``, or its owner's class is."""
    return rule_of(cut.name, user) is not None or not is_own(model.get_submodule(cut.owner))


def is_fused(cut: Cut, cuts: Iterable[Cut]) -> bool:
    """Whether the features of a layer, or of another that its owner puts them together with, are several
    projections'."""
    return any(len(other.blocks or ()) > 1 for other in cuts if other.owner == cut.owner)


def _is_foreign(model: nn.Module, owner: str) -> bool:
    kind = type(model.get_submodule(owner))
    return not (of_transformers(kind) or kind.__module__.startswith("torch."))


def _error(
    model: Any, calls: _Calls, localize: Callable[[], None], labels: bool, given: str | None = None
) -> Exception | None:
    """``labels``: the tokens are the labels too, and without values it is trained."""
    device = torch.device("meta" if calls.values is None else "cpu")
    with _without_weights(model, calls), torch.no_grad(), device, _Reads(calls):
        localize()
        try:
            inputs = nested.mapped(lambda t: t.to(device), inputs_of(model, labels, given))
            vars(model)["training"] |= labels and calls.values is None
            output = model(**inputs) if all(takes(model, name) for name in inputs) else model(*inputs.values())
            if calls.values is not None:
                calls.values.end(output)
        except Exception as error:  # noqa: BLE001  a foreign forward may raise any
            return error
    return None


@contextmanager
def _without_weights(model: nn.Module, calls: _Calls) -> Iterator[None]:
    """Inside, the tensors of ``model`` are on meta, or with made-up values those of sharded layers alone; those of the
    layers that were made are of a rank's size."""
    values = calls.values
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        for module in model.modules():
            table = vars(module)
            table.update({n: _unshared(value, values) for n, value in table.items() if n != "_parameters"})
            _, layer = calls.made.get(module, (None, module))
            mixes = is_large(module) and values is not None and module not in calls.sharded
            given = None if mixes or module in calls.sharded else values
            table["_parameters"] = {n: p if p is None else _emptied(p, given) for n, p in layer._parameters.items()}
            table.update(zip(FORWARD_HOOKS, ({-1: calls.enter}, {-1: calls.leave}), strict=True))
            table.update({name: {} for name in BACKWARD_HOOKS})
            if module in calls.sharded:
                specs = layer.shard_specs if isinstance(layer, ParallelModule) else {}
                whole = {name for name, spec in specs.items() if spec.dim is None}
                own = ((p, module) for name, p in table["_parameters"].items() if p is not None and name not in whole)
                calls.parts.update(own)
                forward = module.forward if values is None else partial(values.compute, module)
                table["forward"] = partial(calls.computing, module, forward)
            elif mixes:
                table["forward"] = partial(mixed, module.get_parameter("weight").shape)
            table["training"] = module.training and values is None
            if "nf" in table and layer is not module:
                table["nf"] = layer.get_parameter("weight").shape[1]
        yield
    finally:
        for table, attributes in before:
            table.clear()
            table.update(attributes)


def _emptied(p: Tensor, values: MadeUp | None) -> nn.Parameter:
    if values is not None:
        return filled(p, values.generator)
    return nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)


def _unshared(value: object, values: MadeUp | None) -> object:
    """What a forward may change in place of ``value``: it is what it was afterwards."""
    if isinstance(value, Tensor):
        return value.to("meta") if values is None else widened(value)
    if type(value) not in (dict, list, set):
        return value
    return {n: _unshared(v, values) for n, v in value.items()} if isinstance(value, dict) else copy.copy(value)


def _refusal(model: nn.Module, calls: _Calls, error: Exception | None) -> str:
    names = {module: name and general(model, name) for name, module in model.named_modules()}
    inside = calls.inside[-1] if calls.inside else model
    if calls.read is not None:
        layer = names[calls.read]
        return (
            f"{names[inside] or 'its forward'} ({type(inside).__name__}) reads a parameter of {layer} itself, of which "
            f"a rank has a part: let it call that; plan={{{names[inside] or layer!r}: 'replicate'}} leaves it whole"
        )
    name, cut = names[inside] or "its forward", calls.made[inside][0] if inside in calls.made else None
    text = str(error).rstrip(".")
    said = f"{name} ({type(inside).__name__}) fails with what a rank has: {type(error).__name__}: {text}."
    given = {names[c.module]: features(c.module)[1] for c in calls.open}
    parts = ", ".join(f"{layer} gives a part of its {count} features" for layer, count in given.items())
    owner = names[model.get_submodule(calls.open[-1].owner)] if calls.open else names[inside]
    if isinstance(error, OtherValues):
        return (
            f"{name} ({type(inside).__name__}) {text}: {parts or 'no layer gives a part'}, and what follows does not "
            f"compute each of them by itself, in its place: give such layers {plan.COLUMN_GATHERED!r}, or "
            f"plan={{{owner!r}: 'replicate'}} leaves it whole"
        )
    if not calls.open and cut is not None and cut.style in CLOSES:
        return (
            f"{said} It reads a part of its {features(cut.module)[0]} features by the style {cut.style!r}, and no "
            f"'colwise' layer gave one: give the layer before it that style, or {name} {plan.ROW_SPLIT!r}"
        )
    heads = (
        f". If {name} computes heads, their number is num_heads and their size head_dim of it, whose forward reads "
        "there how many a rank has"
    )
    return (
        f"{said} {parts or 'No layer gave a part'}, and no 'rowwise' layer has read it: give the one that does this "
        f"style, or the others {plan.COLUMN_GATHERED!r}{'' if is_linear(inside) else heads}. "
        f"plan={{{owner!r}: 'replicate'}} leaves it whole"
    )
