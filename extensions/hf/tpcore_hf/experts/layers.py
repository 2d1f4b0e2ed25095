"""Layers of experts, whose parameters are bare tensors with an entry for each expert.

Transformers gives them one form: ``experts(tokens [T, H], numbers [T, K], weights [T, K]) -> [T, H]``. The router
above is whole on every rank, so all ranks agree on numbers and weights, and a rank computes a part of the sum over
experts and features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.backend.grouped import grouped_matmul, one_by_one
from tpcore.backend.interface import Backend
from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.layers.adopt import filled
from tpcore.layers.blocks import check_divides
from tpcore.layers.embedding import exporting
from tpcore.layers.module import ParallelModule
from tpcore.layout.layout import AxisCut, Layout
from tpcore.layout.shard import Block, ShardSpec

from ..plan import rules as plan
from ..plan.heads import Need
from ..private import EXPERTS, PASSES_OTHERS
from ..sequence.rows import DealtRows
from .blocks import summed_in_blocks
from .dispatch import (
    ALL_TO_ALL,
    Dispatch,
    GatherTokens,
    Route,
    SendTokens,
    grouped,
    has_known_form,
    has_seat,
    one_program,
    seated,
    with_capacity,
)

_NUMBERS, _WEIGHTS = "top_k_index", "top_k_weights"


class ShardedExperts(ParallelModule):
    """The experts of one layer, with this rank's part of their parameters: a class before that of the experts, whose
    forward computes with these. Each rank of tp has some features of all experts, or all features of some experts. The
    gradients of the inputs, and the outputs, are summed over the ranks. Over ``ep``, whose ranks have other tokens,
    each rank has some experts, or some of those that its tp rank has. Gathering the tokens moves ``(ep - 1) H`` numbers
    per token and direction, all-to-all with a capacity factor f ``f K (ep - 1) / ep H``, and never more: gathering is
    no dearer up to ``ep = f K``."""

    dispatch: Dispatch = Dispatch()
    _standard = False
    _names: tuple[str, ...] = ()
    """The arguments of the experts' own forward: torch.compile does not follow a look at its signature."""
    route: Route | None = None
    """How the last forward's tokens came to other ranks' experts, and why."""

    def __init__(self, specs: Mapping[str, ShardSpec], comm: Comm, ep: Comm | None) -> None:
        super().__init__(comm)
        self.ep = ep
        self.shard_specs.update(specs)
        cut = [spec for spec in specs.values() if spec.dim is not None]
        self.distributed = all(spec.dim == 0 for spec in cut)
        """Whether a rank of tp has some experts, and not features of all."""
        self.of_a_rank = self.sharding_of(next(iter(specs))).local_shape[0] if self._spread else None
        """The number of experts that a rank has; None if it has features of all."""
        self.sequences: DealtRows | None = None
        """Of which this rank has some of the tokens, over cp."""
        self.watchers: list[Callable[[Tensor], None]] = []
        """Called in each forward with the number of choices that this rank drops, of its own or for its experts."""

    @classmethod
    def from_plain(
        cls, plain: nn.Module, specs: Mapping[str, ShardSpec], comm: Comm, ep: Comm | None = None
    ) -> ShardedExperts:
        """This rank's part of experts of transformers. ``specs``: of each of their parameters."""
        layer = filled(cls(specs, comm, ep), plain)
        layer._standard = has_known_form(plain)
        parameters = inspect.signature(layer.own_forward).parameters.values()
        layer._names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
        for cut in specs.values():
            check_divides(layer, cut)
        if layer.of_a_rank is not None:
            # transformers' own forwards pass by numbers of experts that are not here, in this mode
            vars(layer).update({"num_experts": layer.of_a_rank, PASSES_OTHERS: True})
        return layer

    @property
    def _spread(self) -> bool:
        return self.distributed or self.ep is not None

    def layout_of(self, name: str) -> Layout:
        layout = super().layout_of(name)
        over_ep = AxisCut(("ep",), ShardSpec(layout.shape, 0))
        return layout if self.ep is None else replace(layout, cuts=(*layout.cuts, over_ep))

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The experts' own."""
        return super().forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(self._names) or any(name in kwargs for name in self._names[: len(args)]):
            inspect.signature(self.own_forward).bind(*args, **kwargs)  # raises a TypeError that says which
        kwargs = dict(zip(self._names, args, strict=False)) | kwargs
        bound = {name: kwargs.pop(name) for name in self._names if name in kwargs}
        if self.sequences is not None and self.dispatch.capacity_factor is not None:
            bound |= self._with_seats(bound[_NUMBERS], bound[_WEIGHTS], self.sequences)
        if self.tp.blocks is not None:
            return summed_in_blocks(self, kwargs | bound)
        choices = bound[_NUMBERS].shape if _NUMBERS in bound else None
        route = None if self.ep is None else self._routed(bound, self.ep)
        inputs = {name: self._entered(value, route) for name, value in bound.items()} | kwargs
        if self.of_a_rank is not None:
            inputs[_NUMBERS], inputs[_WEIGHTS] = self.local(inputs[_NUMBERS], inputs[_WEIGHTS], self.of_a_rank)
        parameters = self._parameters
        self.__dict__["_parameters"] = {name: self._used(name, p) for name, p in parameters.items()}
        try:
            out = self.computed(inputs, choices)
            if self.of_a_rank is not None:
                # Where none of a rank's experts is chosen, the graph has no way back to inputs and parameters. The
                # other ranks wait for its part of the inputs' gradients; those of parameters are zeros, not None.
                floats = [t for t in inputs.values() if isinstance(t, Tensor) and t.is_floating_point()]
                used = [*floats, *(p for p in parameters.values() if p is not None)]
                out = out + sum(t.flatten()[:0].sum() for t in used)
            return ops.reduce(out if route is None else route.leave(out), self.tp, dtype=torch.float32)
        finally:
            self.__dict__["_parameters"] = parameters

    def extra_repr(self) -> str:
        shapes = (f"{name}={tuple(spec.shape)}" for name, spec in self.shard_specs.items())
        return f"{type(self).__bases__[-1].__name__}, {', '.join(shapes)}, tp={self.tp.size}"

    def _entered(self, value: Any, route: GatherTokens | SendTokens | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            value = ops.copy(value, self.tp, dtype=torch.float32)
        return value if route is None else route.enter(value)

    def _routed(self, inputs: Mapping[str, Any], ep: Comm) -> GatherTokens | SendTokens:
        """The way of a rank's tokens to the experts of other ep ranks."""
        shares, numbers = ep.size * (self.tp.size if self.distributed else 1), inputs[_NUMBERS]
        route = self.dispatch.by_bytes(next(iter(inputs.values())), numbers, inputs[_WEIGHTS], shares, ep.size)
        if not torch.compiler.is_compiling():
            self.route = route
        if route.way != ALL_TO_ALL:
            return GatherTokens(ep)
        n = self.of_a_rank or 1
        local = numbers - (self.tp.position * (n * ep.size) if self.distributed else 0)
        destination = torch.where((local >= 0) & (local < n * ep.size), local // n, ep.size)
        source, dropped = seated(destination, ep.size, route.seats)
        self._tell(dropped)
        return SendTokens(source, len(numbers), ep)

    def computed(self, inputs: dict[str, Any], choices: torch.Size | None) -> Any:
        """What the experts here add, each to no more tokens than it has seats for. ``choices``: a rank's ``[T, K]``."""
        if choices is not None and self.dispatch.capacity_factor is not None:
            tokens = choices[0] * (1 if self.ep is None else self.ep.size)
            tokens *= 1 if self.sequences is None else self.sequences.comm.size
            seats = self.dispatch.seats(tokens, choices[1], self.number_of_experts)
            if seats < len(inputs[_NUMBERS]):
                out, dropped = with_capacity(self, **inputs, seats=seats)
                self._tell(dropped)
                return out
        backend = self._layout_ctx.backend
        if self._standard and type(backend).grouped_matmul is not Backend.grouped_matmul:
            output = grouped(self, backend.grouped_matmul, *inputs.values())
            if output is not None:
                return output
        if self._standard and exporting() and self.tp.eager and self.tp.reads_are_cheap and not torch.is_grad_enabled():
            return grouped(self, grouped_matmul, *inputs.values())
        # a forward that is compiled cannot depend on the experts that are chosen
        if self._standard and (not self.tp.eager or torch.compiler.is_dynamo_compiling()):
            return one_program(self, *inputs.values())
        if self._standard and self._spread and getattr(self.config, EXPERTS) == "eager":
            # not every eager forward passes by numbers of experts that are not here: Nemotron-H's does not
            return grouped(self, one_by_one, *inputs.values())
        # by place: transformers' implementations have not GPT-OSS's names
        placed = []
        for name in self._names:
            if name not in inputs:
                break
            placed.append(inputs.pop(name))
        return self.own_forward(*placed, **inputs)

    @property
    def number_of_experts(self) -> int:
        return next(iter(self.shard_specs.values())).shape[0]

    def _with_seats(self, numbers: Tensor, weights: Tensor, sequences: DealtRows) -> dict[str, Tensor]:
        """Both without the choices that have no seat among those of whole sequences, and of all ep ranks."""
        local, ep = len(numbers), 1 if self.ep is None else self.ep.size
        whole = sequences.whole(numbers)
        everyone = whole if self.ep is None else self.ep.all_gather(whole, 0)
        seats = self.dispatch.seats(len(everyone), numbers.shape[1], self.number_of_experts)
        kept = has_seat(everyone, self.number_of_experts, seats)
        kept = sequences.cut(kept if self.ep is None else self.ep.split(kept.to(torch.int64), 0).to(torch.bool))
        mine = numbers // (self.number_of_experts // self.tp.size) == self.tp.position if self.distributed else True
        self._tell((~kept & mine).sum().reshape(1))
        if seats < local * ep:  # of which no choice without a seat takes one
            return {_NUMBERS: torch.where(kept, numbers, self.number_of_experts)}
        return {_WEIGHTS: torch.where(kept, weights, 0.0)}

    def _tell(self, dropped: Tensor) -> None:
        for watcher in self.watchers:
            watcher(dropped)

    def local(self, numbers: Tensor, weights: Tensor, n: int, of_a_rank: int | None = None) -> tuple[Tensor, Tensor]:
        """The numbers of ``n`` experts counted from this rank's first; others are ``n``, without weight."""
        first = self.tp.position * (of_a_rank or n) if self.distributed else 0
        if self.ep is not None:
            first = (first * self.ep.size if self.distributed else 0) + self.ep.position * n
        local = numbers - first
        here = (local >= 0) & (local < n)
        return torch.where(here, local, n), torch.where(here, weights, 0.0)

    def _used(self, name: str, p: Tensor | None) -> Tensor | None:
        """Over ep the gradient is the mean of what the ranks' examples give, as of any parameter. A whole parameter, a
        bias of each expert's output, is in every rank's part of the sum: divided."""
        if p is not None and self.ep is not None:
            p = ops.averaged(p, self.ep)
        if p is None or self.shard_specs[name].dim is not None:
            return p
        return ops.copy(p, self.tp, dtype=torch.float32) / self.tp.size


def dispatch_by(model: nn.Module, dispatch: Dispatch) -> None:
    """Let all layers of experts in ``model`` send their tokens so."""
    for layer in model.modules():
        if isinstance(layer, ShardedExperts):
            layer.dispatch = dispatch


@contextmanager
def dropping_nothing(model: nn.Module) -> Iterator[None]:
    """Where a token counts alone: no choice is dropped for those of other tokens."""
    before = {layer: layer.dispatch for layer in model.modules() if isinstance(layer, ShardedExperts)}
    for layer, dispatch in before.items():
        layer.dispatch = replace(dispatch, capacity_factor=None)
    try:
        yield
    finally:
        for layer, dispatch in before.items():
            layer.dispatch = dispatch


def specs_of(
    name: str, experts: nn.Module, styles: Mapping[str, str], distributed: bool, ep: int
) -> tuple[dict[str, ShardSpec], list[Need]]:
    """How the parameters of ``experts`` are sharded over tp: by ``styles`` of their features, or ``distributed`` by
    experts. ``ep``: among how many ranks the experts of each are divided then. ValueError for parameters of which
    neither is surely right, and for experts that ep does not divide."""
    kind, parameters = type(experts).__name__, dict(experts.named_parameters(recurse=False))
    remedy = f"plan={{{plan.wildcard(name)!r}: 'replicate'}} leaves it whole on every rank"
    if len(list(experts.parameters())) > len(parameters):
        raise ValueError(f"{plan.wildcard(name)} ({kind}) has modules with parameters inside: {remedy}")
    if distributed or ep > 1:
        option = "expert_parallel=True" if distributed else f"ep={ep}"
        counts = {p.shape[0] for p in parameters.values()}
        named = {_NUMBERS, _WEIGHTS} <= inspect.signature(experts.forward).parameters.keys()
        if len(counts) > 1 or not named or not hasattr(experts, PASSES_OTHERS):
            raise ValueError(
                f"{option}: {plan.wildcard(name)} ({kind}) computes with all experts at once, "
                "and each rank would have some: leave it out, which shards the features of all"
            )
        count = counts.pop()
        if count % ep:
            raise ValueError(f"ep={ep} does not divide the {count} experts of {plan.wildcard(name)}")
        if distributed:
            need = Need(name, count // ep, f"experts{f' on each of ep={ep} ranks' if ep > 1 else ''}")
            return {leaf: ShardSpec(tuple(p.shape), 0) for leaf, p in parameters.items()}, [need]
    specs = {leaf: _by_features(experts, leaf, tuple(p.shape), styles.get(leaf)) for leaf, p in parameters.items()}
    needs, cut = [], {}
    for leaf, spec in specs.items():
        if spec is None:
            raise ValueError(f"{plan.wildcard(name)}.{leaf} ({kind}) has no style, and no known meaning: {remedy}")
        cut[leaf] = spec
        needs += [Need(f"{name}.{leaf}", b.size // b.unit, "features of each expert") for b in spec.blocks[:1]]
    return cut, needs


def _by_features(experts: nn.Module, leaf: str, shape: tuple[int, ...], style: str | None) -> ShardSpec | None:
    if style is None:  # only what is added to an expert's output is the same on each rank
        return ShardSpec(shape) if leaf.startswith("down") and leaf.endswith("bias") else None
    last = len(shape) - 1
    dim = last if style in (plan.ROW, plan.PACKED_ROW) or len(shape) == 2 else last - 1
    gated = style in (plan.PACKED_COLUMN, plan.PACKED_ROW) or leaf.startswith("gate_up")
    if gated and not getattr(experts, "is_concatenated", True):  # gate and up in turns
        return ShardSpec(shape, dim, (Block(shape[dim], 2),))
    return ShardSpec(shape, dim, (Block(shape[dim] // 2),) * 2 if gated else (Block(shape[dim]),))
