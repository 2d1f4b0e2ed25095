"""A sharded model beside its plain twin: the same output, loss and gradients, or the first that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import nested
from ..layers.sharding import sharding
from ..layout.layout import Layout
from ..layout.slices import narrowed
from ..runtime.consensus import together
from ..runtime.context import current
from ..train.data_parallel import reduce_gradients

_NOISE = 1e-2  # of the largest gradient: smaller ones, as of a key's bias, may be rounding alone


class _Value(NamedTuple):
    name: str
    got: Tensor | None
    want: Tensor | None  # the twin's
    parameter: Tensor | None = None  # that ``got`` is a part of, or of whose gradient


def compare(
    model: nn.Module,
    whole: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    reduce: bool = False,
) -> None:
    """Raise AssertionError on every rank unless ``model`` computes what ``whole``, its plain twin, does.

    Weights are compared first, then the outputs, then the gradients of the inputs that require one and of
    every parameter; a rank compares the parts that it has. The error names the first tensor that differs,
    with its values. Both models run once on copies of ``inputs`` (a tensor, a tuple of arguments or a dict of
    keywords), from one random state; their gradients stay in ``.grad``. Collective over the world.

    - ``loss``: of an output; both models' are compared. Without it, ``output.loss`` if there is one, else a
      fixed random weighting of the outputs.
    - ``names``: the twin's name of each parameter that has another one there.
    - ``tolerance``: relative to the largest value of a tensor; default 4e-10 for float64, 7e-5 for float32.
    - ``reduce``: gradients are averaged over the data ranks before, as of a model that gives each its own examples.
    """
    ctx = current()
    with together(ctx):
        pairs = _pairs(model, whole, names or {})
        _judge([_Value(f"the weight of {name!r}", p, twin, p) for name, p, twin in pairs], tolerance)
    state = torch.get_rng_state()
    want = _run(whole, inputs, loss)
    torch.set_rng_state(state)
    got = _run(model, inputs, loss)
    if reduce:
        reduce_gradients(model)
    with together(ctx):
        if got.keys() != want.keys():
            raise AssertionError(f"the model gives {', '.join(got)}; its twin gives {', '.join(want)}")
        _judge([_Value(name, value, want[name]) for name, value in got.items()], tolerance)
        gradients = [_Value(f"the gradient of {name!r}", p.grad, twin.grad, p) for name, p, twin in pairs]
        _judge(gradients, tolerance, _NOISE * max((_largest(g.want) for g in gradients), default=0.0))


def _pairs(model: nn.Module, whole: nn.Module, names: Mapping[str, str]) -> list[tuple[str, Tensor, Tensor]]:
    """(name, parameter, the twin's), in the model's order."""
    twins = dict(whole.named_parameters())
    mine = {names.get(name, name): (name, p) for name, p in model.named_parameters()}
    if mine.keys() != twins.keys():
        raise ValueError(
            f"only the model has {sorted(mine.keys() - twins.keys())}, only its twin "
            f"{sorted(twins.keys() - mine.keys())}: names={{'a name in the model': 'its name in the twin'}}"
        )
    return [(name, p, twins[twin]) for twin, (name, p) in mine.items()]


def _run(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None) -> dict[str, Tensor | None]:
    """One forward and backward: the tensors of the output, the loss, the gradients of the inputs."""
    model.zero_grad()
    batch = nested.mapped(lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)
    output = model(**batch) if isinstance(batch, Mapping) else model(*([batch] if isinstance(batch, Tensor) else batch))
    values: dict[str, Tensor | None] = dict(_tensors("output", output))
    total = getattr(output, "loss", None) if loss is None else loss(output)
    if total is None:
        total = _weighted([t for t in values.values() if t is not None and t.requires_grad])
    else:
        values["loss"] = total
    total.backward()
    leaves = [(name, x) for name, x in _tensors("input", batch) if x.requires_grad]
    return values | {f"the gradient of {name}": x.grad for name, x in leaves}


def _weighted(outputs: Sequence[Tensor]) -> Tensor:
    if not outputs:
        raise ValueError("no output needs a gradient: compare takes a loss= too")
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, dtype=t.dtype, generator=draw).to(t.device) for t in outputs]
    return torch.stack([(t * w).sum() for t, w in zip(outputs, weights, strict=True)]).sum()


def _tensors(name: str, nest: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(nest, Tensor):
        yield name, nest
    elif isinstance(nest, Mapping | list | tuple):
        for key, value in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
            yield from _tensors(f"{name}[{key!r}]", value)


def _judge(values: Sequence[_Value], tolerance: float | None, least: float = 0.0) -> None:
    """Raise for the first value that differs, and name the others. ``least``: see _NOISE."""
    wrong = [(v.name, text) for v in values if (text := _difference(v, tolerance, least)) is not None]
    if wrong:
        others = f"; so do {', '.join(name for name, _ in wrong[1:6])}" if wrong[1:] else ""
        more = f" and {len(wrong) - 6} more" if wrong[6:] else ""
        raise AssertionError(" ".join(wrong[0]) + others + more)


def _difference(value: _Value, tolerance: float | None, least: float) -> str | None:
    _, got, want, parameter = value
    if got is None or want is None:
        return None if got is want else "differs: only " + ("its twin has one" if got is None else "it has one")
    mark = None if parameter is None else sharding(parameter)
    layout, ctx = (Layout(tuple(got.shape)), current()) if mark is None else (mark.layout, mark.ctx)
    if layout.shape != tuple(want.shape):
        return f"differs: its shape is {layout.shape}, in the twin {tuple(want.shape)}"
    if tolerance is None:
        tolerance = torch.finfo(got.dtype).eps ** 0.6 if got.is_floating_point() else 0.0
    allowed = tolerance * max(_largest(want), least)
    for box in layout.boxes(ctx.rank, ctx.mesh):
        mine = narrowed(got, box.local, box.size).detach().cpu().double()
        twin = narrowed(want, box.full, box.size).detach().cpu().double()
        wrong = ~((mine - twin).abs() <= allowed)  # not error > allowed: NaN is wrong as well
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            where = [f + i for f, i in zip(box.full, at, strict=True)]
            values = f"it is {mine[at]:.6g}, in the twin {twin[at]:.6g}"
            return f"differs: at {where} {values} (allowed {allowed:.1g}){_factor(mine, twin)}"
    return None


def _factor(mine: Tensor, twin: Tensor) -> str:
    """What a sum over the ranks too many, or one that is missing, looks like."""
    ratio = float((mine * twin).sum() / (twin * twin).sum().clamp_min(1e-300))
    alike = twin.numel() > 1 and torch.allclose(mine, twin * ratio, rtol=1e-3)
    return f", and all of it is {ratio:.3g} times the twin's" if alike else ""


def _largest(value: Tensor | None) -> float:
    return float(value.detach().abs().max()) if value is not None and value.numel() else 0.0
