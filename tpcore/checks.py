"""Checks of checked runs and recorded steps: no part is used as a whole, and tp ranks have equal data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .calls import call_site
from .comm import Comm
from .consensus import gather_bytes

_MOST = 10_000  # notes kept between two comparisons; evaluation never compares
_CHUNKS = 16
_TOLERANCE = 1e-3  # relative, for a chunk's sum: ranks may round differently; other data differs by far more
_CONTRACTIONS = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "scaled_dot_product_attention",
        "conv1d",
        "sum",
        "mean",
    ]
)
_OVER_LAST = frozenset(("layer_norm", "rms_norm"))
_OVER_DIM = frozenset(("softmax", "log_softmax", "logsumexp", "argmax", "normalize"))
_OVER_CLASSES = frozenset(("cross_entropy", "nll_loss"))


@dataclass(frozen=True)
class Mark:
    """The ``width`` entries along ``dim`` are this rank's part of the features or of the tokens."""

    kind: str
    dim: int
    width: int
    ranks: int
    report: Callable[[str], None]


class PartOf(Tensor):
    """This rank's part of an activation, in a run with checks: every operation on it is inspected.

    The result of an operation is a part too, if the cut dim can be found in the result.
    """

    mark: Mark

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        mark = next(t.mark for t in given if isinstance(t, PartOf))
        name = getattr(func, "__name__", "")
        problem = _problem(name, mark, given, args, kwargs)
        if problem:
            mark.report(problem)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return out if name in _CONTRACTIONS else _propagated(out, mark, given)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _propagated(out: Any, mark: Mark, given: list[Tensor]) -> Any:
    if isinstance(out, (list, tuple)) and type(out) in (list, tuple):
        return type(out)(_propagated(one, mark, given) for one in out)
    if not isinstance(out, Tensor) or isinstance(out, PartOf) or not out.is_floating_point():
        return out
    places = [dim for dim, size in enumerate(out.shape) if size == mark.width]
    if mark.dim not in places and len(places) != 1:
        return out
    dim = mark.dim if mark.dim in places else places[0]
    return _marked(out, replace(mark, dim=dim))


def _marked(t: Tensor, mark: Mark) -> PartOf:
    part = t.as_subclass(PartOf)
    part.mark = mark
    return part


def _problem(
    name: str, mark: Mark, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """What is wrong with a call of the function ``name`` on a part; None if nothing is."""
    have = f"{mark.width} of {mark.width * mark.ranks} {mark.kind}"
    if mark.kind == "tokens":
        whole = [t for t in given if isinstance(t, nn.Parameter) and t.requires_grad]
        if whole and torch.is_grad_enabled() and not getattr(whole[0], "sequence_parallel_enabled", False):
            return (
                f"{name} with a parameter of shape {tuple(whole[0].shape)} sees {have}, and so would its "
                "gradient: in a sequence-parallel region use tpcore.RMSNorm or tpcore.LayerNorm with "
                "sequence_parallel_enabled=True, or tpcore.ops.copy(parameter, comm) in a layer of your own"
            )
        return None
    if mark.dim not in _reduced(name, args, kwargs):
        return None
    remedy = (
        "use tpcore.parallel_cross_entropy"
        if name in _OVER_CLASSES or name == "log_softmax"
        else "gather them first (gather_output=True, or tpcore.ops.gather)"
    )
    return f"{name} sees only {have}, different ones on each rank: {remedy}"


def _reduced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> range | tuple[int, ...]:
    """The dims that the function ``name`` reduces or normalizes over."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor):
        return ()
    if name in _OVER_CLASSES:
        return (min(1, x.ndim - 1),)
    if name in _OVER_LAST:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return range(x.ndim - len(shape), x.ndim)
    if name in _OVER_DIM:
        dim = kwargs.get("dim", args[1] if len(args) > 1 and name != "normalize" else None)
        dim = 1 if dim is None and name == "normalize" else dim
        return (dim % x.ndim,) if isinstance(dim, int) else ()
    return ()


def plain(t: Tensor) -> Tensor:
    """``t`` without its mark, for layers that handle parts correctly."""
    # by type: isinstance asks the metaclass, which takes five times as long
    return t.as_subclass(Tensor) if type(t) is PartOf else t


Note = tuple[str, list[float]]
"""What should be equal on all ranks of a tp group and where, and a digest of it."""


class Checks:
    """The checks of one rank. ``report`` receives each problem and may raise. ``running``: whether ranks run,
    so that ``compare`` can be called; if not, they are recorded, on tensors mostly without values."""

    def __init__(self, report: Callable[[str], None], *, running: bool) -> None:
        self._report, self.running = report, running
        self.notes: list[Note] = []

    def __deepcopy__(self, memo: object) -> Checks:
        return self

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        """Mark ``y`` as this rank's chunk along ``dim``. ``kind``: "features" or "tokens"."""
        if comm.size == 1 or torch.compiler.is_compiling():
            return y
        dim %= y.ndim
        return _marked(plain(y), Mark(kind, dim, y.shape[dim], comm.size, self._report))

    def same(self, what: str, t: Tensor, at: str = "") -> None:
        """Note a digest of ``t``, which should be equal on all tp ranks. ``at``: where; by default the line
        outside of tpcore."""
        if not t.is_meta and len(self.notes) < _MOST and not torch.compiler.is_compiling():
            code, line = call_site()
            where = at or f"at {code.co_filename}:{line} in {code.co_name}"
            self.notes.append((f"{what} {where}", _digest(plain(t.detach()))))

    def compare(self, comm: Comm) -> None:
        """Report, on all ranks of ``comm``, the first note in which they differ. Collective."""
        mine, self.notes = self.notes, []
        if not self.running or comm.size == 1 or not comm.eager:
            return
        every = [json.loads(text) for text in gather_bytes(json.dumps(mine).encode(), comm)]
        found = first_difference(comm.transport.members, every)
        if found is not None:
            self._report(found)


def first_difference(ranks: Sequence[int], every: Sequence[Sequence[Note]]) -> str | None:
    """A message about the first note in which ranks of one tp group differ; None if there is none."""
    for other, notes in zip(ranks[1:], every[1:], strict=True):
        for (what, here), (also, there) in zip(every[0], notes, strict=False):
            if what != also or not _alike(here, there):
                return (
                    f"ranks {ranks[0]} and {other} of one tp group differ in {what}"
                    + (f" (rank {other}: {also})" if what != also else "")
                    + ". The ranks of a tp group need the same batch and the same seed: count dp ranks "
                    "in the sampler (ctx.coord('dp')), and call tpcore.random.manual_seed alike on all"
                )
    return None


def _digest(t: Tensor) -> list[float]:
    flat = t.reshape(-1)
    if not flat.is_floating_point():
        if flat.is_complex() or not flat.numel():
            return [float(flat.numel())]
        places = torch.arange(flat.numel(), device=flat.device) % 1009 + 1
        return [float(flat.numel()), float(int((flat.to(torch.int64) * places).sum()) % (1 << 52))]
    sums = [float(chunk.abs().sum(dtype=torch.float64)) for chunk in flat.chunk(_CHUNKS)]
    return [float(flat.numel()), *(s if math.isfinite(s) else -1.0 for s in sums)]


def _alike(a: list[float], b: list[float]) -> bool:
    exact = len(a) == len(b) == 2
    return len(a) == len(b) and all(
        x == y if exact else abs(x - y) <= _TOLERANCE * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)
    )


def raising() -> Checks:
    """Checks for a run: each problem is raised as a ValueError."""

    def report(problem: str) -> None:
        raise ValueError(problem)

    return Checks(report, running=True)
