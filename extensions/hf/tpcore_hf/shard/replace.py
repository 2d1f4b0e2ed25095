"""Modules become parallel layers, in place: the same modules and Parameters, which get this rank's part last of all."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.layers import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelConv1D,
    RowParallelLinear,
)
from tpcore.layers.adopt import become, is_hooked, prepared, twin
from tpcore.layers.module import ParallelModule
from tpcore.layout.shard import Block
from tpcore.runtime.context import current

from ..experts.layers import ShardedExperts
from ..plan import rules as plan
from ..plan.decisions import Cut
from .forwards import go_around, select_heads, share_identity, sum_gradients
from .trial import Made


@contextmanager
def restored_if_refused(model: nn.Module) -> Iterator[None]:
    """Inside, modules are changed, and Parameters only marked; if it fails, ``model`` is as it was, its hooks' handles
    and all objects in it the same."""
    before = []
    for module in model.modules():
        tables = {id(value): copy.copy(value) for value in vars(module).values() if isinstance(value, dict | set)}
        before.append((module, type(module), dict(vars(module)), tables))
    marks = [(vars(t), dict(vars(t))) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for module, kind, attributes, tables in before:
            module.__class__ = kind
            for table in (value for value in attributes.values() if id(value) in tables):
                table.clear()
                table.update(tables[id(table)])
            vars(module).clear()
            vars(module).update(attributes)
        for now, then in marks:
            now.clear()
            now.update(then)
        raise


def layers_for(cuts: Iterable[Cut], over: Callable[[Cut], Comm]) -> Made:
    """The parallel layers that cut modules are to become. ``over``: the ranks that have the parts of each."""
    layers = dict[nn.Module, tuple[Cut, ParallelModule]]()
    for cut in cuts:
        try:
            layer = _parallel_layer(cut, over(cut))
        except ValueError as error:
            raise ValueError(f"{cut.name}: {error}") from None
        if layer is not None:
            layers[cut.module] = cut, layer
    return layers


def replace(model: nn.Module, cuts: list[Cut], layers: Made, over: Callable[[Cut], Comm]) -> list[ParallelModule]:
    """Let each cut module become its parallel layer; returns these, whose Parameters are still whole."""
    _check_ties(model, layers)
    _check_attached(model, cuts)
    for module, (_, layer) in layers.items():
        become(module, layer)
    for cut in cuts:
        if cut.style == plan.SUMMED:
            comm = over(cut)
            sum_gradients(cut.module, comm, heads=_heads_around(cut, layers.values()) if comm.blocks else ())
        elif cut.style == plan.PARAMETER_HEADS:
            select_heads(cut.module, over(cut), cut.copies(over(cut).size))
        elif cut.style == plan.LATENT:
            go_around(cut.module, model.get_submodule(cut.owner), over(cut))
        elif cut.style == plan.IDENTITY_EXPERT:
            share_identity(cut.module, over(cut))
    return [module for module in layers if isinstance(module, ParallelModule)]


def _heads_around(cut: Cut, layers: Iterable[tuple[Cut, ParallelModule]]) -> list[Block]:
    """Of a rank, by the outputs of the column layers in the owner of ``cut``."""
    near = [layer for other, layer in layers if other.name.startswith(f"{cut.owner}.")]
    columns = [layer for layer in near if isinstance(layer, ColumnParallelLinear)]
    return [Block(b.size // c.tp.size, b.unit) for c in columns for b in c.shard_specs["weight"].blocks]


def _plain(old: nn.Module) -> nn.Module:
    """``old``, or the ``nn.Linear`` whose forward is equivalent to its own."""
    if type(old).__name__ != "FalconLinear" or not isinstance(old, nn.Linear):
        return old
    plain = twin(old)
    plain.__class__ = nn.Linear
    return plain


def _parallel_layer(cut: Cut, comm: Comm) -> ParallelModule | None:
    """The layer that the module is to become; None if the style replaces nothing."""
    old, style, options = _plain(cut.module), cut.style, dict[str, Any](group=comm)
    conv = hasattr(old, "nf") and not isinstance(old, nn.Linear)
    column = (ColumnParallelConv1D if conv else ColumnParallelLinear).from_plain
    row = (RowParallelConv1D if conv else RowParallelLinear).from_plain
    make: dict[str, Callable[[nn.Module], ParallelModule]] = {
        plan.COLUMN: partial(column, gather_output=False, blocks=cut.blocks, pad=cut.padded is not None, **options),
        plan.COLUMN_GATHERED: partial(column, gather_output=True, pad=True, **options),
        plan.ROW: partial(row, input_is_parallel=True, blocks=cut.blocks or 1, pad=cut.padded is not None, **options),
        plan.ROW_SPLIT: partial(row, input_is_parallel=False, pad=True, **options),
        plan.PACKED_ROW: partial(row, input_is_parallel=True, blocks=cut.blocks, **options),
        plan.EMBEDDING_ROW: partial(_embedding, pad=True, **options),
        plan.EMBEDDING_COLUMN: partial(_embedding, shard_across_embedding=True, pad=True, **options),
        plan.EMBEDDING_HEADS: partial(_HeadsTable.from_plain, shard_across_embedding=True, **options),
    }
    make[plan.PACKED_COLUMN] = make[plan.QKV_COLUMN] = make[plan.COLUMN]
    make[plan.PARTIAL] = partial(ShardedExperts.from_plain, specs=cut.specs or {}, comm=comm)
    ep = current().over_axis("ep")
    make[plan.EXPERTS] = partial(ShardedExperts.from_plain, specs=cut.specs or {}, comm=comm, ep=ep)
    return prepared(old, make[style]) if style in make else None


class _HeadsTable(ParallelEmbedding):
    """A table with features for each head: its output is those of this rank's heads."""

    collect_output = False


def _asks_torch(old: nn.Embedding) -> bool:
    """Whether the forward of a subclass looks rows up by ``nn.Embedding``'s: it is tried until it does, so that nothing
    that follows, with its hooks, runs."""

    class Asked(Exception):
        pass

    class Asks(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            raise Asked

    probe = copy.copy(old)
    probe.__class__ = type("Probe", (type(old), Asks), {})
    try:
        probe.forward(torch.zeros(1, 1, dtype=torch.int64, device=old.weight.device))
    except Asked:
        return True
    return False


class _Table(ParallelEmbedding, nn.Embedding):
    """A parallel embedding that is also an ``nn.Embedding``, for subclasses that call ``super().forward``."""


def _embedding(old: nn.Module, **options: Any) -> ParallelModule:
    """The parallel embedding for an ``nn.Embedding`` or for a subclass whose forward extends it."""
    kind = type(old)
    if not isinstance(old, nn.Embedding) or kind.forward is nn.Embedding.forward:
        return ParallelEmbedding.from_plain(old, **options)
    if not _asks_torch(old):
        raise ValueError(
            f"{kind.__name__} has a forward of its own that does not ask nn.Embedding's: it cannot be sharded; "
            "give its name the style 'replicate'"
        )
    plain = twin(old)
    plain.__class__ = nn.Embedding
    layer = ParallelEmbedding.from_plain(plain, **options)
    layer.__class__ = type(kind.__name__, (kind, _Table), {"__module__": kind.__module__})
    return layer


def _check_ties(model: nn.Module, layers: Made) -> None:
    """ValueError if a tied Parameter is cut differently at its places, or not at all."""
    owners = defaultdict[nn.Parameter, list[tuple[nn.Module, str]]](list)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                owners[p].append((module, name))
    for module, (cut, layer) in layers.items():
        for name, spec in layer.shard_specs.items():
            p = module.get_parameter(name)
            for other, leaf in owners[p]:
                tied, like = layers.get(other, (None, None))
                if tied is not None and like is not None and like.shard_specs[leaf] != spec:
                    raise ValueError(
                        f"{cut.name}.{name} and {tied.name}.{leaf} are one tied parameter, "
                        f"cut as {cut.style} and as {tied.style}: give both names one style"
                    )
                part = layer.get_parameter(name)
                if tied is None and part.shape != p.shape and next(other.children(), None) is None:
                    raise ValueError(
                        f"{cut.name}.{name} is tied to {leaf!r} of a {type(other).__name__}, which the plan leaves "
                        "whole: cut both, or neither with the style 'replicate'"
                    )


_IN_PARTS = {plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN, plan.ROW, plan.PACKED_ROW, plan.EMBEDDING_HEADS}
"""Styles of layers that take or return a part of the features, which the module that calls them handles."""
_PARTLY = {plan.SUMMED, plan.PARAMETER_HEADS, plan.IDENTITY_EXPERT}
"""Styles of modules that stay what they are, and see a rank's part of the heads, or of a sum."""


def _check_attached(model: nn.Module, cuts: list[Cut]) -> None:
    """ValueError for what is attached to a module that is not replaced, and would take a part for the whole."""
    partly = {cut.name: cut.module for cut in cuts if cut.style in _PARTLY}
    for cut in cuts:
        name = cut.owner if cut.style in _IN_PARTS else cut.name if cut.style in (plan.EXPERTS, plan.PARTIAL) else None
        owner = nn.Module() if name is None else model.get_submodule(name)
        if cut.style in _IN_PARTS and "forward" in vars(owner):
            raise ValueError(
                f"{name} ({type(owner).__name__}) has a forward of its own, set on it, which would see a rank's part "
                f"of the features: delete it, or leave that whole, plan={{{plan.wildcard(str(name))!r}: 'replicate'}}"
            )
        for child, module in owner.named_children():  # activations and dropouts
            if next(module.parameters(), None) is None:
                partly[f"{name}.{child}".lstrip(".")] = module
    around = [(name, *pair) for name, module in partly.items() for pair in module.named_modules(prefix=name)]
    around += [(name, name, model.get_submodule(name)) for name in _between(cuts)]
    for name, inner, part in around:
        if is_hooked(part) or "forward" in vars(part):
            raise ValueError(
                f"{inner} ({type(part).__name__}) has hooks, or a forward set on it, that would see a rank's part "
                f"of the features: register them on {name.rpartition('.')[0]}, or after parallelize"
            )


def _between(cuts: Iterable[Cut]) -> Iterator[str]:
    """Names of modules with a column layer and without the row layer that reads it, or the reverse: what leaves or
    enters them is a part."""
    region: list[list[str]] = []
    for cut in cuts:
        if cut.style in _IN_PARTS:
            region.append(cut.name.split("."))
        if cut.style in (plan.ROW, plan.PACKED_ROW):
            levels = enumerate(zip(*region, strict=False))
            shared = next((n for n, names in levels if len(set(names)) > 1), len(region[0]))
            yield from (".".join(path[:n]) for path in region for n in range(shared + 1, len(path)))
            region = []
