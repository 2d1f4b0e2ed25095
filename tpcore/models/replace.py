"""Replaces modules by parallel layers. Parameters stay the same objects and get this rank's part."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.comm import Comm
from ..layers import ColumnParallelConv1D, ColumnParallelLinear, ParallelEmbedding, RowParallelConv1D, RowParallelLinear
from ..layers.module import ParallelModule, become_part
from ..runtime.context import current
from . import plan
from .cuts import Cut
from .experts import ShardedExperts
from .forwards import go_around, select_heads, share_identity, sum_gradients

Places = dict[int, list[tuple[nn.Module, str]]]


def replace(model: nn.Module, cuts: Iterable[Cut], over: Callable[[Cut], Comm]) -> None:
    """Put a parallel layer in the place of each cut module, under each of its names. ``over``: the ranks that
    have its parts."""
    cuts = list(cuts)
    children, owners = _places(model, "_modules"), _places(model, "_parameters")
    for group in _by_ties(cuts, owners):
        layers = [(cut, _parallel_layer(cut, over(cut))) for cut in group]
        _adopt(layers, owners)
        for cut, layer in layers:
            for parent, leaf in children[id(cut.module)] if layer is not None else ():
                setattr(parent, leaf, layer)
    for cut in cuts:
        if cut.style == plan.SUMMED:
            sum_gradients(cut.module, over(cut))
        elif cut.style == plan.PARAMETER_HEADS:
            select_heads(cut.module, over(cut), cut.copies(over(cut).size))
        elif cut.style == plan.LATENT:
            go_around(cut.module, model.get_submodule(cut.owner), over(cut))
        elif cut.style == plan.IDENTITY_EXPERT:
            share_identity(cut.module, over(cut))


def _places(model: nn.Module, table: str) -> Places:
    """The places (module, name) of each child or Parameter by id; one that is shared has several."""
    places: Places = defaultdict(list)
    for module in model.modules():
        for name, item in vars(module)[table].items():
            if item is not None:
                places[id(item)].append((module, name))
    return places


def _by_ties(cuts: list[Cut], owners: Places) -> Iterator[list[Cut]]:
    """The cuts one by one, but all those with a shared Parameter together: each has to read all of it before it is cut.
    All new parts of that group exist at once, beside what is whole."""
    tied = [cut for cut in cuts if any(len(owners[id(p)]) > 1 for p in cut.module.parameters(recurse=False))]
    yield tied
    yield from ([cut] for cut in cuts if cut not in tied)


def _plain(old: nn.Module) -> nn.Module:
    """``old``, or the ``nn.Linear`` whose forward is equivalent to its own."""
    if type(old).__name__ != "FalconLinear" or not isinstance(old, nn.Linear):
        return old
    plain = nn.Linear(old.in_features, old.out_features, old.bias is not None, device="meta")
    plain.weight, plain.bias = old.weight, old.bias
    return plain.train(old.training)


def _parallel_layer(cut: Cut, comm: Comm) -> ParallelModule | None:
    """The parallel layer, still with new parameters of its own; None if the style replaces nothing."""
    old, style, options = _plain(cut.module), cut.style, dict[str, Any](group=comm)
    conv = hasattr(old, "nf") and not isinstance(old, nn.Linear)
    column: type[ColumnParallelLinear] = ColumnParallelConv1D if conv else ColumnParallelLinear
    row: type[RowParallelLinear] = RowParallelConv1D if conv else RowParallelLinear
    make: dict[str, Callable[[], ParallelModule]] = {
        plan.COLUMN: lambda: column.from_plain(old, gather_output=False, blocks=cut.blocks, **options),
        plan.COLUMN_GATHERED: lambda: column.from_plain(old, gather_output=True, pad=True, **options),
        plan.ROW: lambda: row.from_plain(old, input_is_parallel=True, **options),
        plan.ROW_SPLIT: lambda: row.from_plain(old, input_is_parallel=False, pad=True, **options),
        plan.PACKED_ROW: lambda: row.from_plain(old, input_is_parallel=True, blocks=cut.blocks, **options),
        plan.EMBEDDING_ROW: lambda: _embedding(old, pad=True, **options),
        plan.EMBEDDING_COLUMN: lambda: _embedding(old, shard_across_embedding=True, pad=True, **options),
        plan.EMBEDDING_HEADS: lambda: _embedding(old, collect=False, shard_across_embedding=True, **options),
    }
    make[plan.PACKED_COLUMN] = make[plan.QKV_COLUMN] = make[plan.COLUMN]
    make[plan.PARTIAL] = lambda: ShardedExperts(old, cut.specs or {}, comm)
    make[plan.EXPERTS] = lambda: ShardedExperts(old, cut.specs or {}, comm, current().over_axis("ep"))
    return make[style]() if style in make else None


def _asks_torch(old: nn.Embedding) -> bool:
    """Whether the forward of a subclass looks rows up by ``nn.Embedding``'s: it is tried, for one id."""
    asked = []

    class Asked(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            asked.append(ids)
            return super().forward(ids)

    probe = copy.copy(old)
    probe.__class__ = type("Probe", (type(old), Asked), {})
    with torch.no_grad():
        probe.forward(torch.zeros(1, 1, dtype=torch.int64, device=old.weight.device))
    return bool(asked)


class _Table(ParallelEmbedding, nn.Embedding):
    """A parallel embedding that is also an ``nn.Embedding``, for subclasses that call ``super().forward``."""


def _embedding(old: nn.Module, collect: bool = True, **options: Any) -> ParallelModule:
    """The parallel embedding for an ``nn.Embedding`` or for a subclass whose forward extends it."""
    kind = type(old)
    if not isinstance(old, nn.Embedding) or kind.forward is nn.Embedding.forward:
        layer = ParallelEmbedding.from_plain(old, **options)
        layer.collect_output = collect
        return layer
    if not _asks_torch(old):
        raise ValueError(
            f"{kind.__name__} has a forward of its own that does not ask nn.Embedding's: it cannot be cut; "
            "give its name the style 'replicate'"
        )
    names = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type")
    plain = nn.Embedding(**{name: getattr(old, name) for name in names}, device="meta")
    plain.weight = old.weight
    layer = ParallelEmbedding.from_plain(plain, **options).train(old.training)
    layer.collect_output = collect
    for name, value in vars(old).items():
        if name not in vars(layer):
            setattr(layer, name, value)
    for name, buffer in old.named_buffers(recurse=False):
        layer.register_buffer(name, buffer, name not in old._non_persistent_buffers_set)
    for name, child in old.named_children():
        layer.add_module(name, child)
    layer.__class__ = type(kind.__name__, (kind, _Table), {"__module__": kind.__module__})
    return layer


def _adopt(replaced: list[tuple[Cut, ParallelModule | None]], owners: Places) -> None:
    """Give the old Parameters the new parts, and the new layers the old Parameters: an optimizer that was made before
    keeps its own, and tied ones stay tied. ValueError if one is cut differently at its places, or not at all."""
    layers = {id(cut.module): (cut, layer) for cut, layer in replaced if layer is not None}
    parts: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for cut, layer in layers.values():
        for name in layer.shard_specs:
            p, part = cut.module.get_parameter(name), layer.get_parameter(name).data
            for module, other in owners[id(p)]:
                tied, tied_layer = layers.get(id(module), (None, None))
                if (
                    tied is not None
                    and tied_layer is not None
                    and tied_layer.shard_specs[other] != layer.shard_specs[name]
                ):
                    raise ValueError(
                        f"{cut.name}.{name} and {tied.name}.{other} are one tied parameter, "
                        f"cut as {cut.style} and as {tied.style}: give both names one style"
                    )
                if tied is None and part.shape != p.shape and next(module.children(), None) is None:
                    raise ValueError(
                        f"{cut.name}.{name} is tied to {other!r} of a {type(module).__name__}, which the plan leaves "
                        "whole: cut both, or neither with the style 'replicate'"
                    )
            parts[id(p)] = p, part
    for p, part in parts.values():
        become_part(p, part)
    for cut, layer in layers.values():
        for name in layer.shard_specs:
            layer.register_parameter(name, cut.module.get_parameter(name))
